use std::io::Cursor;

use proptest::prelude::*;

use super::*;

fn walk(bytes: &[u8]) -> Listing {
    list(&mut Cursor::new(bytes), bytes.len() as u64).expect("reading from memory does not fail")
}

/// A header block with a right checksum.
fn header(name: &str, kind: u8, size: u64) -> [u8; 512] {
    let mut block = [0u8; 512];
    block[..name.len()].copy_from_slice(name.as_bytes());
    block[124..136].copy_from_slice(format!("{size:011o}\0").as_bytes());
    block[156] = kind;
    block[257..263].copy_from_slice(b"ustar\0");
    checksum(&mut block);
    block
}

fn checksum(block: &mut [u8; 512]) {
    block[148..156].fill(b' ');
    let sum: u64 = block.iter().map(|&byte| u64::from(byte)).sum();
    block[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
}

fn with_data(bytes: &mut Vec<u8>, header: [u8; 512], data: &[u8]) {
    bytes.extend(header);
    bytes.extend(data);
    bytes.resize(bytes.len().next_multiple_of(512), 0);
}

fn pax(records: &[(&str, &str)]) -> Vec<u8> {
    let mut data = Vec::new();
    for (key, value) in records {
        let payload = format!(" {key}={value}\n");
        let mut length = payload.len() + 1;
        while length.to_string().len() + payload.len() != length {
            length = length.to_string().len() + payload.len();
        }
        data.extend(format!("{length}{payload}").bytes());
    }
    data
}

fn names(listing: &Listing) -> Vec<&str> {
    listing.members.iter().map(|member| member.name.as_str()).collect()
}

#[test]
fn reads_what_the_tar_crate_writes() {
    let long = format!("{}/{}.flac", "d".repeat(90), "n".repeat(150));
    let mut builder = ::tar::Builder::new(Vec::new());
    let files = [
        ("a.flac", &b"first"[..]),
        (long.as_str(), &[7u8; 1000]),
        ("empty", b""),
        ("a.flac", b"second!"),
    ];
    for (name, data) in files {
        let mut header = ::tar::Header::new_gnu();
        header.set_size(data.len() as u64);
        builder.append_data(&mut header, name, data).unwrap();
    }
    let mut link = ::tar::Header::new_gnu();
    link.set_entry_type(::tar::EntryType::Symlink);
    link.set_size(0);
    builder.append_link(&mut link, "link", "/etc/passwd").unwrap();
    let bytes = builder.into_inner().unwrap();
    let listing = walk(&bytes);
    assert_eq!(listing.end, End::Whole);
    assert_eq!(names(&listing), ["a.flac", long.as_str(), "empty", "a.flac", "link"]);
    let last = listing.last_of_each_name();
    assert_eq!(
        last.iter().map(|member| member.name.as_str()).collect::<Vec<_>>(),
        [&long, "empty", "a.flac", "link"]
    );
    let second = last[2];
    assert_eq!(&bytes[second.offset as usize..][..second.size as usize], b"second!");
    assert_eq!(last[3].kind, MemberKind::Other);
}

#[test]
fn pax_records_override_and_end_with_their_member() {
    let mut bytes = Vec::new();
    with_data(&mut bytes, header("g", b'g', 0), b"");
    let records = pax(&[("path", "./wörter/ä.flac"), ("size", "5"), ("mtime", "1.5")]);
    with_data(&mut bytes, header("x", b'x', records.len() as u64), &records);
    with_data(&mut bytes, header("short", b'0', 0), b"hello");
    with_data(&mut bytes, header("plain", b'0', 2), b"ok");
    let listing = walk(&bytes);
    assert_eq!(names(&listing), ["wörter/ä.flac", "plain"]);
    assert_eq!(listing.members[0].size, 5);
    assert_eq!(listing.end, End::Whole);
    // The same, where the record lies about its own length.
    let mut lying = Vec::new();
    with_data(&mut lying, header("x", b'x', 12), b"99 path=abc\n");
    with_data(&mut lying, header("short", b'0', 0), b"");
    assert!(matches!(walk(&lying).end, End::Cut(_)));
}

#[test]
fn prefix_base_256_and_old_directories() {
    let mut bytes = Vec::new();
    let mut block = header("name.flac", b'0', 0);
    block[345..350].copy_from_slice(b"a/b/c");
    block[124] = 0x80;
    block[125..136].fill(0);
    block[135] = 3;
    checksum(&mut block);
    with_data(&mut bytes, block, b"abc");
    // A version 7 directory with a size: it has no data.
    with_data(&mut bytes, header("folder/", 0, 512), b"");
    with_data(&mut bytes, header("after", 0, 1), b"x");
    let listing = walk(&bytes);
    assert_eq!(names(&listing), ["a/b/c/name.flac", "folder", "after"]);
    assert_eq!(
        (listing.members[0].size, listing.members[0].kind),
        (3, MemberKind::Regular)
    );
    assert_eq!(listing.members[1].kind, MemberKind::Other);
}

#[test]
fn a_compressed_tar_is_said_to_be_one() {
    for (bytes, said) in [
        (
            &b"\x1f\x8b\x08\0"[..],
            "gzip; give its name the ending .gz and unpack it with gunzip",
        ),
        (b"BZh91AY", "bzip2"),
        (b"\xfd7zXZ\0", "xz"),
        (b"\x28\xb5\x2f\xfd\0", "zstd"),
    ] {
        let End::Cut(why) = walk(bytes).end else {
            panic!("{said}: a whole tar")
        };
        assert!(
            why.contains("is not a tar but compressed by") && why.contains(said),
            "{why}"
        );
    }
}

#[test]
fn cut_tars_keep_what_is_whole() {
    let mut bytes = Vec::new();
    with_data(&mut bytes, header("one", b'0', 700), &[1; 700]);
    with_data(&mut bytes, header("two", b'0', 700), &[2; 700]);
    // No end blocks: good.
    assert_eq!(walk(&bytes).end, End::Whole);
    // Within the padding of the last member: the member is whole, the tar is not.
    let listing = walk(&bytes[..bytes.len() - 10]);
    assert!(matches!(listing.end, End::Cut(_)));
    assert_eq!(
        listing
            .members
            .iter()
            .map(|member| member.truncated)
            .collect::<Vec<_>>(),
        [false, false]
    );
    // Within the data.
    let listing = walk(&bytes[..bytes.len() - 600]);
    assert!(matches!(listing.end, End::Cut(_)));
    assert_eq!(
        listing
            .members
            .iter()
            .map(|member| member.truncated)
            .collect::<Vec<_>>(),
        [false, true]
    );
    // Within the second header.
    let listing = walk(&bytes[..512 + 1024 + 100]);
    assert!(matches!(listing.end, End::Cut(_)));
    assert_eq!(names(&listing), ["one"]);
    assert!(matches!(walk(b"").end, End::Cut(_)));
    assert!(matches!(walk(b"PK\x03\x04 not a tar at all").end, End::Cut(_)));
    assert_eq!(walk(&[0; 1024]).end, End::Whole);
}

#[test]
fn claims_of_size_are_not_believed() {
    for (kind, size) in [(b'L', 1 << 40), (b'x', 1 << 30), (b'0', (1 << 33) - 1), (b'L', 4096)] {
        let mut block = header("huge", kind, 0);
        block[124] = 0x80;
        block[125..128].fill(0);
        block[128..136].copy_from_slice(&u64::to_be_bytes(size));
        checksum(&mut block);
        let mut bytes = Vec::new();
        with_data(&mut bytes, block, b"little");
        let listing = walk(&bytes);
        assert!(matches!(listing.end, End::Cut(_)), "{kind} {size}");
    }
    // Negative and overflowing numbers.
    for first in [0xffu8, 0x80] {
        let mut block = header("odd", b'0', 0);
        block[124..136].fill(0xff);
        block[124] = first;
        checksum(&mut block);
        assert!(matches!(walk(&block).end, End::Cut(_)));
    }
}

proptest! {
    /// Damage anywhere: the walk ends, and every member that it calls whole is inside the file.
    #[test]
    fn damage_never_panics_or_leads_outside(
        members in proptest::collection::vec((0usize..4, 0usize..1500), 0..6),
        damage in proptest::collection::vec((any::<proptest::sample::Index>(), any::<u8>()), 0..12),
        cut in any::<proptest::sample::Index>(),
        fix_checksums in any::<bool>(),
    ) {
        let mut bytes = Vec::new();
        for (kind, size) in &members {
            let records = pax(&[("path", "p"), ("size", &size.to_string())]);
            match kind {
                0 => with_data(&mut bytes, header("L", b'L', 5), b"long\0"),
                1 => with_data(&mut bytes, header("x", b'x', records.len() as u64), &records),
                _ => {}
            }
            with_data(&mut bytes, header("m", b'0', *size as u64), &vec![9; *size]);
        }
        bytes.extend([0; 1024]);
        for (place, value) in &damage {
            let place = place.index(bytes.len());
            bytes[place] = *value;
            if fix_checksums {
                let start = place / 512 * 512;
                let block: &mut [u8; 512] = (&mut bytes[start..start + 512]).try_into().unwrap();
                checksum(block);
            }
        }
        bytes.truncate(cut.index(bytes.len() + 1));
        let listing = walk(&bytes);
        prop_assert!(listing.members.len() <= bytes.len() / 512);
        for member in &listing.members {
            prop_assert!(member.truncated || member.offset + member.size <= bytes.len() as u64);
        }
    }

    #[test]
    fn noise_is_no_tar(bytes in proptest::collection::vec(any::<u8>(), 0..4096)) {
        walk(&bytes);
    }
}
