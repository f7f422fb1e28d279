//! A bad disk: one bit of a file of the state directory is flipped, size and time stay. The next run has the same bytes:
//! what was damaged is named and made again.

use std::fs::{File, FileTimes};
use std::path::{Path, PathBuf};

use flow_random::SplitMix64;

use crate::binary::{Workplace, copy_folder, expect_code, stderr};
use crate::transcription::recording;

fn files_below(folder: &Path, found: &mut Vec<PathBuf>) {
    let mut entries: Vec<_> = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap()).collect();
    entries.sort_by_key(|entry| entry.file_name());
    for entry in entries {
        match entry.file_type().unwrap().is_dir() {
            true => files_below(&entry.path(), found),
            false => found.push(entry.path()),
        }
    }
}

/// Flips one bit, and gives the file that has it. Data files, of which most of a state directory consists, have half of them.
fn flip_one_bit(state: &Path, random: &mut SplitMix64) -> PathBuf {
    let mut files = Vec::new();
    files_below(state, &mut files);
    files.retain(|file| file.metadata().unwrap().len() > 0);
    let is_data = |file: &PathBuf| file.extension().is_some_and(|extension| extension == "parquet");
    let (data, others): (Vec<_>, Vec<_>) = files.into_iter().partition(is_data);
    let chosen = if random.below(2) == 0 { data } else { others };
    let path = chosen[random.below(chosen.len())].clone();
    let modified = path.metadata().unwrap().modified().unwrap();
    let mut bytes = std::fs::read(&path).unwrap();
    let bit = random.below(bytes.len() * 8);
    bytes[bit / 8] ^= 1 << (bit % 8);
    std::fs::write(&path, bytes).unwrap();
    let file = File::options().write(true).open(&path).unwrap();
    file.set_times(FileTimes::new().set_modified(modified)).unwrap();
    path
}

/// `FLOW_TEST_FLIPS` is another number of flips.
#[test]
fn a_flipped_bit_in_the_state_changes_no_row() {
    let flips = std::env::var("FLOW_TEST_FLIPS").map_or(24, |flips| flips.parse().unwrap());
    let changed = ["min_quality=0.8"];
    let right = Workplace::new("micro");
    right.build_manifests(&changed);
    let expected = right.out_bytes();

    let place = Workplace::new("micro");
    place.build_manifests(&[]);
    let (state, whole) = (place.path("state"), place.path("whole"));
    std::fs::rename(&state, &whole).unwrap();
    let mut random = SplitMix64::new(7);
    let (mut mended, mut refused) = (0, 0);
    for _ in 0..flips {
        copy_folder(&whole, &state);
        let path = flip_one_bit(&state, &mut random);
        let output = place.manifest_command("run", &changed).output().unwrap();
        let said = stderr(&output);
        let name = path.file_name().unwrap().to_str().unwrap();
        // Nothing tells how a state directory whose version is damaged is to be read.
        if name == "FORMAT" && !output.status.success() {
            refused += 1;
            assert!(said.contains(name), "{} is not named:\n{said}", path.display());
            expect_code(&output, 1);
        } else {
            expect_code(&output, 0);
            mended += usize::from(said.contains(name));
            assert!(
                place.out_bytes() == expected,
                "other bytes after damage of {}",
                path.display()
            );
            std::fs::remove_dir_all(place.out()).unwrap();
        }
        std::fs::remove_dir_all(&state).unwrap();
    }
    println!("{flips} flips: {mended} mended with a warning, {refused} refused, the others in what was not read");
    assert!(mended > 0, "no damage was noticed");
}

/// `flow transcribe` asks earlier runs which files they wrote.
#[test]
fn damaged_notes_of_an_earlier_run_do_not_end_a_transcription() {
    let place = Workplace::new("micro");
    std::fs::create_dir(place.path("recordings")).unwrap();
    std::fs::write(place.path("recordings/a.flac"), recording("rec_hi_0001_000.flac")).unwrap();
    let transcribed = || {
        let output = place.transcribe_command("txt").output().unwrap();
        expect_code(&output, 0);
        (std::fs::read(place.path("texts/a.txt")).unwrap(), stderr(&output))
    };
    let (text, _) = transcribed();
    let mut snapshots = Vec::new();
    files_below(&place.path("state/snapshots"), &mut snapshots);
    assert!(!snapshots.is_empty());
    for snapshot in snapshots {
        let mut bytes = std::fs::read(&snapshot).unwrap();
        bytes[30] ^= 1;
        std::fs::write(snapshot, bytes).unwrap();
    }
    // What it noted of the files that it was writing.
    std::fs::remove_dir_all(place.path("state/scratch")).unwrap();
    let (again, said) = transcribed();
    assert!(
        again == text && said.contains("is damaged") && said.contains("count as edited"),
        "{said}"
    );
    let (again, said) = transcribed();
    assert!(again == text && !said.contains("damaged"), "{said}");
}
