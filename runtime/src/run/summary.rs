//! What a run did.

/// What a run did.
#[derive(Clone, Debug)]
pub struct RunSummary {
    /// Name of the run: its folder below `runs/` of the state directory.
    pub run: String,
    pub stages: Vec<StageSummary>,
    /// Stage partitions that ran, and that were reused.
    pub ran: u64,
    pub reused: u64,
    pub seconds: f64,
    /// Stages past a reject limit whose action is `warn`. Not empty: exit code 4.
    pub past_reject_limit: Vec<String>,
}

#[derive(Clone, Debug)]
pub struct StageSummary {
    pub stage: String,
    pub kind: String,
    pub ran: u64,
    pub reused: u64,
    pub rows_in: u64,
    pub rows_out: u64,
    pub rejects: Vec<flow_base::reject::ReasonCount>,
}
