//! The numeric self-test, as checks.

use flow_kernels::device::DeviceChoice;
use flow_model::selftest::{self, Parity};

use super::check::Check;

pub fn run(device: DeviceChoice) -> Vec<Check> {
    match selftest::run(device) {
        Ok(parts) => parts.iter().map(|part| check(part, device)).collect(),
        Err(error) => vec![Check::fail(
            "self-test",
            format!("could not be computed on {device}: {error}"),
            "name another device with --device; the other lines say what is missing",
        )],
    }
}

fn check(part: &Parity, device: DeviceChoice) -> Check {
    let name = format!("self-test of {}", part.name);
    let what = format!("{} comparisons with NeMo on {device}", part.compared);
    if part.is_right() {
        let found = format!(
            "{what}, the largest error is {:.0} % of what is allowed",
            part.worst * 100.0
        );
        return Check::ok(name, found);
    }
    let found = match part.worst.is_finite() {
        true => format!(
            "{what}, the largest error is {:.3} times what is allowed: {}",
            part.worst, part.at
        ),
        false => format!("{what}, and another result altogether: {}", part.at),
    };
    Check::fail(
        name,
        found,
        "what this machine computes cannot be trusted: try another machine or device, and report this with the line above",
    )
}

#[cfg(test)]
mod tests {
    use super::super::State;
    use super::*;

    #[test]
    fn errors_beyond_what_is_allowed_fail() {
        let part = |worst| Parity {
            name: "loss",
            compared: 4,
            worst,
            at: "utterance 2".into(),
        };
        assert_eq!(check(&part(0.25), DeviceChoice::Cpu).state, State::Ok);
        for worst in [1.001, f64::INFINITY] {
            let check = check(&part(worst), DeviceChoice::Cpu);
            assert_eq!(check.state, State::Fail);
            assert!(check.found.ends_with(": utterance 2"), "{}", check.found);
        }
    }
}
