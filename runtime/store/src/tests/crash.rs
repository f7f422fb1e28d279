//! Simulated crashes for tests: file operations that stop after a number of steps, and what a power failure loses.

use std::collections::BTreeSet;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

/// What of the file operations remains after the crash.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Remains {
    /// All that was done: the process was killed.
    All,
    /// What was flushed: the machine lost its power. Files not flushed are cut in half, names in folders not
    /// flushed are as they were.
    Flushed,
}

pub(crate) struct Crash {
    state: Mutex<State>,
}

struct State {
    steps_left: u64,
    steps_done: u64,
    unflushed: BTreeSet<PathBuf>,
    undo: Vec<Undo>,
}

enum Undo {
    Rename {
        from: PathBuf,
        to: PathBuf,
        replaced: Option<Vec<u8>>,
    },
    Remove {
        path: PathBuf,
        content: Vec<u8>,
    },
}

impl Undo {
    fn folder(&self) -> Option<&Path> {
        match self {
            Undo::Rename { to, .. } => to.parent(),
            Undo::Remove { path, .. } => path.parent(),
        }
    }
}

impl Crash {
    pub(crate) fn after(steps: u64) -> Arc<Self> {
        let state = State {
            steps_left: steps,
            steps_done: 0,
            unflushed: BTreeSet::new(),
            undo: Vec::new(),
        };
        Arc::new(Crash {
            state: Mutex::new(state),
        })
    }

    pub(crate) fn steps_done(&self) -> u64 {
        self.state.lock().unwrap().steps_done
    }

    pub(crate) fn step(&self) -> io::Result<()> {
        let mut state = self.state.lock().unwrap();
        if state.steps_left == 0 {
            return Err(io::Error::other("the machine has stopped"));
        }
        state.steps_left -= 1;
        state.steps_done += 1;
        Ok(())
    }

    pub(crate) fn written(&self, path: &Path) {
        self.state.lock().unwrap().unflushed.insert(path.to_path_buf());
    }

    pub(crate) fn synced(&self, path: &Path) {
        self.state.lock().unwrap().unflushed.remove(path);
    }

    pub(crate) fn folder_synced(&self, folder: &Path) {
        self.state
            .lock()
            .unwrap()
            .undo
            .retain(|undo| undo.folder() != Some(folder));
    }

    pub(crate) fn renamed(&self, from: &Path, to: &Path) {
        let mut state = self.state.lock().unwrap();
        if state.unflushed.remove(from) {
            state.unflushed.insert(to.to_path_buf());
        }
        let replaced = std::fs::read(to).ok();
        state.undo.push(Undo::Rename {
            from: from.to_path_buf(),
            to: to.to_path_buf(),
            replaced,
        });
    }

    pub(crate) fn removed(&self, path: &Path) {
        if let Ok(content) = std::fs::read(path) {
            self.state.lock().unwrap().undo.push(Undo::Remove {
                path: path.to_path_buf(),
                content,
            });
        }
    }

    /// Leaves on the disk what the crash leaves.
    pub(crate) fn settle(&self, remains: Remains) {
        let mut state = self.state.lock().unwrap();
        if remains == Remains::All {
            return;
        }
        while let Some(undo) = state.undo.pop() {
            match undo {
                Undo::Rename { from, to, replaced } => {
                    // The operation was not done if the crash came after it was noted and before it was done.
                    match std::fs::rename(&to, &from) {
                        Ok(()) if state.unflushed.remove(&to) => {
                            state.unflushed.insert(from);
                        }
                        // The folder of temporary files is gone, and its content with it.
                        Err(_) if !from.parent().is_some_and(Path::exists) => {
                            let _ = std::fs::remove_file(&to);
                            state.unflushed.remove(&to);
                        }
                        _ => {}
                    }
                    if let Some(content) = replaced {
                        std::fs::write(&to, content).unwrap();
                    }
                }
                Undo::Remove { path, content } => std::fs::write(&path, content).unwrap(),
            }
        }
        for path in &state.unflushed {
            if let Ok(metadata) = std::fs::metadata(path) {
                let file = std::fs::File::options().write(true).open(path).unwrap();
                file.set_len(metadata.len() / 2).unwrap();
            }
        }
    }
}
