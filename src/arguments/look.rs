//! Arguments of the commands about past runs.

use std::path::{Path, PathBuf};

use clap::Args;

use super::StateArguments;

/// Selects a run.
#[derive(Args, Clone, Debug)]
pub struct LookArguments {
    /// Only consider runs of this pipeline
    pub pipeline: Option<PathBuf>,
    /// With the values of this overlay, as given to `flow run`; may be given several times
    #[arg(long, value_name = "FILE", requires = "pipeline", conflicts_with = "run")]
    pub config: Vec<PathBuf>,
    /// With this value of a parameter, as given to `flow run`: the latest run that had the same value of every parameter
    #[arg(long, value_name = "NAME=VALUE", requires = "pipeline", conflicts_with = "run")]
    pub set: Vec<String>,
    /// The run: `latest`, or its name
    #[arg(long, value_name = "ID", default_value = "latest")]
    pub run: String,
    #[command(flatten)]
    pub state: StateArguments,
}

#[derive(Args, Debug)]
pub struct RejectsArguments {
    #[command(flatten)]
    pub look: LookArguments,
    /// Show only the rejects of this stage, row by row
    #[arg(long)]
    pub stage: Option<String>,
    /// Show only the rejects with this reason, row by row
    #[arg(long)]
    pub reason: Option<String>,
    /// Write the rejects to this parquet file instead
    #[arg(long, value_name = "FILE")]
    pub export: Option<PathBuf>,
}

#[derive(Args, Clone, Debug)]
#[command(override_usage = "flow lineage [OPTIONS] [PIPELINE] <SEGMENT>")]
pub struct LineageArguments {
    /// The segment: SEGMENT, LANG/SHARD/SEGMENT, the path of its recording, TAR::MEMBER, or FILE:LINE of a manifest
    pub segment: String,
    #[command(flatten)]
    pub look: LookArguments,
}

impl LineageArguments {
    /// Of two positional arguments clap takes the first one for the required one. It is the pipeline, unless the second
    /// is one and the first is none.
    pub fn in_order(mut self) -> Self {
        let is_pipeline = |text: &Path| {
            text.extension()
                .is_some_and(|ending| ending == "yaml" || ending == "yml")
        };
        if let Some(second) = self
            .look
            .pipeline
            .take_if(|second| is_pipeline(Path::new(&self.segment)) || !is_pipeline(second))
        {
            let first = std::mem::replace(&mut self.segment, second.to_string_lossy().into_owned());
            self.look.pipeline = Some(PathBuf::from(first));
        }
        self
    }
}

#[derive(Args, Debug)]
pub struct CompareArguments {
    /// The runs, two or more, by their ids or by the names of `flow run --name`
    #[arg(required = true, num_args = 2.., value_name = "RUN")]
    pub runs: Vec<String>,
    #[command(flatten)]
    pub state: StateArguments,
}

#[derive(Args, Debug)]
pub struct LogArguments {
    #[command(flatten)]
    pub look: LookArguments,
    /// Print the events as JSON lines, as they were written
    #[arg(long)]
    pub json: bool,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::arguments::{Command, parse};

    #[test]
    fn lineage_takes_the_pipeline_first_as_other_commands_do() {
        for (words, pipeline, segment) in [
            (&["p.yaml", "hi/s/rec"][..], Some("p.yaml"), "hi/s/rec"),
            (&["hi/s/rec"], None, "hi/s/rec"),
            (&["build", "rec", "--set", "a=1"], Some("build"), "rec"),
            (&["rec", "p.yaml"], Some("p.yaml"), "rec"),
            (&["p.yaml"], None, "p.yaml"),
            // Options may be between them.
            (&["p.yaml", "--state", "s", "rec"], Some("p.yaml"), "rec"),
            (&["rec", "--run", "latest", "p.yaml"], Some("p.yaml"), "rec"),
            (&["build", "--set", "a=1", "rec"], Some("build"), "rec"),
            (&["hi.yml", "rec.yaml"], Some("hi.yml"), "rec.yaml"),
        ] {
            let all = ["flow", "lineage"].iter().chain(words);
            let Command::Lineage(arguments) = parse(all).unwrap().command else {
                panic!("another command")
            };
            let arguments = arguments.in_order();
            assert_eq!(arguments.look.pipeline.as_deref(), pipeline.map(Path::new), "{words:?}");
            assert_eq!(arguments.segment, segment, "{words:?}");
        }
        assert!(parse(["flow", "lineage"]).is_err());
    }
}
