//! Reads what planning needs (sources, records, earlier runs, sets of exports, positions of logs), and keeps what is known of
//! every node while a pipeline is planned and run. What follows from it is in [`flow_plan`].

mod decide;
mod earlier;
pub(crate) mod listing;
mod make_plan;
pub(crate) mod state;
