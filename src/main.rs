use std::process::ExitCode;

mod allocator;

fn main() -> ExitCode {
    allocator::keep_freed_memory();
    flow::main(flow::kinds::all())
}
