//! Which GPU a rank computes on.

use candle_core::Device;
use flow_kernels::device::{DeviceChoice, visible_gpus};

use crate::error::TrainingError;

/// Variables that say which process of its machine this one is, from 0: torchrun's, then Slurm's.
const LOCAL_NUMBERS: [&str; 2] = ["LOCAL_RANK", "SLURM_LOCALID"];

/// The device of rank `number` of those of this process, which has `ranks`. `several`: the run has several processes.
///
/// `cuda:1` is that device. With `cuda` a process that sees no more GPUs than it has ranks gives them one each. One that
/// sees more takes those that follow from its number on its machine (`LOCAL_RANK` or `SLURM_LOCALID`), and the first ones
/// where no variable says that, or the run has one process.
///
/// # Errors
/// Where the process does not see as many GPUs as that needs, or a variable holds no number.
pub(crate) fn open_device(
    choice: DeviceChoice,
    number: usize,
    ranks: usize,
    several: bool,
) -> Result<Device, TrainingError> {
    if choice != DeviceChoice::Cuda(None) {
        return Ok(choice.open(number)?);
    }
    let local = several.then(|| local_number(&|name| std::env::var(name).ok()));
    let first = first_gpu(local.transpose()?.flatten(), ranks, visible_gpus()?)?;
    Ok(choice.open(first + number)?)
}

/// Which process of its machine this one is, with the variable that says so.
fn local_number(variable: &dyn Fn(&str) -> Option<String>) -> Result<Option<(&'static str, usize)>, TrainingError> {
    for name in LOCAL_NUMBERS {
        let Some(text) = variable(name).filter(|text| !text.trim().is_empty()) else {
            continue;
        };
        let number = text.trim().parse().map_err(|_| {
            TrainingError::setting(
                "device",
                format!("{name} is `{text}`, which is not a number of a process"),
            )
        })?;
        return Ok(Some((name, number)));
    }
    Ok(None)
}

/// The GPU of the first rank of a process that has `ranks` and sees `visible` GPUs.
fn first_gpu(local: Option<(&str, usize)>, ranks: usize, visible: usize) -> Result<usize, TrainingError> {
    let refuse = |message: String| Err(TrainingError::setting("device", message));
    if visible < ranks {
        return refuse(format!(
            "`cuda` needs {ranks} GPUs for the {ranks} ranks of this process, and it sees {visible}"
        ));
    }
    match local {
        Some((name, number)) if visible > ranks => {
            let first = number.saturating_mul(ranks);
            if first.saturating_add(ranks) > visible {
                return refuse(format!(
                    "{name} says that this is process {number} of its machine; with {ranks} ranks in each process it needs \
                     more than the {visible} GPUs that it sees. Show it as many as it has ranks by CUDA_VISIBLE_DEVICES, or \
                     name one (`cuda:0`)"
                ));
            }
            Ok(first)
        }
        _ => Ok(0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_takes_the_gpus_of_its_number_where_it_sees_those_of_others() {
        let first = |local: Option<usize>, ranks, visible| {
            let local = local.map(|number| ("LOCAL_RANK", number));
            first_gpu(local, ranks, visible).map_err(|error| error.to_string())
        };
        // All GPUs are visible to all processes.
        assert_eq!([0, 1, 3].map(|local| first(Some(local), 2, 8)), [0, 2, 6].map(Ok));
        assert_eq!(first(Some(7), 1, 8), Ok(7));
        // Each process sees its own.
        assert_eq!([0, 1, 3].map(|local| first(Some(local), 2, 2)), [Ok(0), Ok(0), Ok(0)]);
        // Nothing says which process it is.
        assert_eq!(first(None, 2, 8), Ok(0));
        let few = first(None, 4, 2).unwrap_err();
        assert_eq!(
            few,
            "`cuda` needs 4 GPUs for the 4 ranks of this process, and it sees 2"
        );
        let beyond = first(Some(4), 2, 8).unwrap_err();
        assert!(
            beyond.starts_with("LOCAL_RANK says that this is process 4") && beyond.contains("the 8 GPUs"),
            "{beyond}"
        );
        assert!(first(Some(usize::MAX), 2, 8).is_err());
    }

    #[test]
    fn torchruns_variable_comes_before_slurms() {
        let number = |variables: &[(&str, &str)]| {
            let find = |name: &str| {
                let found = variables.iter().find(|(other, _)| *other == name);
                found.map(|(_, value)| (*value).to_owned())
            };
            local_number(&find).map_err(|error| error.to_string())
        };
        assert_eq!(number(&[]), Ok(None));
        assert_eq!(number(&[("SLURM_LOCALID", "3")]), Ok(Some(("SLURM_LOCALID", 3))));
        let both = [("SLURM_LOCALID", "3"), ("LOCAL_RANK", "1")];
        assert_eq!(number(&both), Ok(Some(("LOCAL_RANK", 1))));
        assert_eq!(number(&[("LOCAL_RANK", ""), both[0]]), Ok(Some(("SLURM_LOCALID", 3))));
        let wrong = number(&[("LOCAL_RANK", "one")]).unwrap_err();
        assert!(wrong.starts_with("LOCAL_RANK is `one`"), "{wrong}");
    }
}
