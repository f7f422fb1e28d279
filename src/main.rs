use std::process::ExitCode;

mod process;

fn main() -> ExitCode {
    process::set_up();
    flow::main(flow::kinds::all())
}
