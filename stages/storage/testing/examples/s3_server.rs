//! Serves a folder by the protocol of S3, for trying things out: `s3_server FOLDER [ADDRESS]`. The folders in FOLDER are its buckets.

use std::error::Error;
use std::io::Write;
use std::path::PathBuf;

use flow_storage_testing::TestServer;

fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args_os().skip(1);
    let root = arguments
        .next()
        .map(PathBuf::from)
        .ok_or("usage: s3_server FOLDER [ADDRESS]")?;
    let address = match arguments.next() {
        Some(address) => address.to_str().ok_or("the address is not text")?.parse()?,
        None => ([127, 0, 0, 1], 9000).into(),
    };
    let server = TestServer::start_at(&root, address)?;
    server.list_etags();
    let mut out = std::io::stdout();
    writeln!(
        out,
        "serving {} at {}; end it with Ctrl-C",
        root.display(),
        server.address()
    )?;
    for (name, value) in server.environment() {
        if name.starts_with("AWS_") {
            writeln!(out, "export {name}={value}")?;
        }
    }
    out.flush()?;
    loop {
        std::thread::park();
    }
}
