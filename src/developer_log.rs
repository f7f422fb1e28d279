//! A log for developers: events of `tracing` on standard error, at the levels of `FLOW_LOG`. Users see the events and messages of a
//! run.

use std::io::stderr;
use std::str::FromStr;

use tracing_subscriber::filter::Targets;
use tracing_subscriber::layer::{Layer, SubscriberExt};
use tracing_subscriber::util::SubscriberInitExt;

use flow_cli::failure::Failure;

/// Begins the log that `FLOW_LOG` asks for: `debug`, or levels of modules, as `flow_storage=debug,object_store=info`.
///
/// # Errors
/// If it is no level.
pub fn begin() -> Result<(), Failure> {
    let Some(asked) = std::env::var_os("FLOW_LOG").filter(|asked| !asked.is_empty()) else {
        return Ok(());
    };
    let targets = targets(&asked.to_string_lossy())?;
    let layer = tracing_subscriber::fmt::layer()
        .with_writer(stderr)
        .with_ansi(false)
        .with_filter(targets);
    // A program around this one may have a log of its own.
    let _ = tracing_subscriber::registry().with(layer).try_init();
    Ok(())
}

fn targets(asked: &str) -> Result<Targets, Failure> {
    Targets::from_str(asked).map_err(|error| {
        Failure::usage(
            format!("FLOW_LOG={asked}: {error}"),
            "give `debug`, or levels of modules such as `flow_storage=debug,object_store=info`",
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn levels_are_of_all_modules_or_of_some() {
        use tracing_subscriber::filter::LevelFilter;

        let default = |asked: &str| targets(asked).unwrap().default_level();
        assert_eq!(default("debug"), Some(LevelFilter::DEBUG));
        assert_eq!(default("flow_storage=debug,object_store=info"), None);
        let error = targets("flow_storage=loud").unwrap_err().to_string();
        assert!(error.starts_with("FLOW_LOG=flow_storage=loud: "), "{error}");
    }
}
