use super::*;
use crate::kernels::testing::values;
use crate::layers::golden;

fn archive() -> Vec<u8> {
    std::fs::read(golden::file("model.nemo")).unwrap()
}

fn read(bytes: &[u8]) -> Result<StoredModel> {
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), bytes).unwrap();
    read_model(file.path())
}

#[test]
fn tensors_are_those_that_candle_reads() {
    let stored = read(&archive()).unwrap();
    let (_, other) = golden::model();
    assert_eq!(stored.tensors.len(), other.len());
    for (name, tensor) in other {
        let (_, found) = stored.tensors.iter().find(|(found, _)| *found == name).unwrap();
        assert_eq!(found.dtype(), tensor.dtype());
        assert_eq!(values(found), values(&tensor), "{name}");
    }
    assert_eq!(
        stored.tokenizer.unwrap(),
        std::fs::read(golden::file("tokenizer/tokenizer.model")).unwrap()
    );
    assert!(stored.config_yaml.contains("EncDecRNNTBPEModel"));
}

#[test]
fn a_gzipped_archive_is_read_alike() {
    let mut packer = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    std::io::Write::write_all(&mut packer, &archive()).unwrap();
    let packed = packer.finish().unwrap();
    let (plain, unpacked) = (read(&archive()).unwrap(), read(&packed).unwrap());
    assert_eq!(plain.tensors.len(), unpacked.tensors.len());
    assert_eq!(plain.tokenizer, unpacked.tokenizer);
    assert!(read(&packed[..packed.len() / 2]).is_err());
}

#[test]
fn truncated_archives_are_errors() {
    let bytes = archive();
    for end in [
        0,
        1,
        100,
        511,
        512,
        5000,
        300_000,
        bytes.len() / 2,
        bytes.len() - 20_000,
    ] {
        let end = end.min(bytes.len() - 20_000);
        assert!(read(&bytes[..end]).is_err(), "cut at {end}");
    }
}

#[test]
fn damaged_archives_are_errors_or_still_read() {
    let bytes = archive();
    // The pickle, the headers of the zip and its directory are where structure lies.
    let structure: Vec<usize> = [
        &b"data.pkl"[..],
        b"PK\x01\x02",
        b"PK\x05\x06",
        b"PK\x03\x04",
        b"_rebuild_tensor_v2",
    ]
    .iter()
    .flat_map(|mark| {
        let at = bytes.windows(mark.len()).position(|window| window == *mark).unwrap();
        at.saturating_sub(40)..at + 160
    })
    .step_by(3)
    .collect();
    for at in structure {
        for change in [0xff, 0x80, 0x01] {
            let mut damaged = bytes.clone();
            damaged[at] ^= change;
            drop(read(&damaged));
        }
    }
}

#[test]
fn pickles_that_do_more_than_state_dicts_are_refused() {
    // os.system("true"), an unknown instruction, a self-reference, a cut number.
    for hostile in [
        &b"\x80\x02cos\nsystem\nX\x04\x00\x00\x00true\x85R."[..],
        b"\x80\x02\xff.",
        b"}q\x00X\x01\x00\x00\x00ah\x00s.",
        b"\x80",
    ] {
        assert!(pickle::read_state_dict(hostile).is_err());
    }
}
