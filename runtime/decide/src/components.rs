//! Connected components of rows (union-find).

use flow_base::error::StageError;

/// Sets of rows, each of which begins as a set of its own.
pub(super) struct Components {
    /// A row of the same set with a smaller number, or the row itself.
    parents: Vec<u32>,
    /// By the root of a set, whether its rows have several keys.
    mixed: Vec<u64>,
}

impl Components {
    /// # Errors
    /// When there are more rows than 32 bits number.
    pub fn new(rows: u64) -> Result<Self, StageError> {
        let Ok(rows) = u32::try_from(rows) else {
            return Err(StageError::failed(format!(
                "it can connect 2^32 rows at most, and there are {rows}"
            )));
        };
        Ok(Components {
            parents: (0..rows).collect(),
            mixed: vec![0; (rows as usize).div_ceil(64)],
        })
    }

    fn root(&mut self, mut row: u32) -> u32 {
        loop {
            let parent = self.parents[row as usize];
            if parent == row {
                return row;
            }
            let above = self.parents[parent as usize];
            self.parents[row as usize] = above;
            row = above;
        }
    }

    /// Joins the sets of two rows. `other_key`: where these were two sets, their rows have several keys.
    pub fn join(&mut self, one: u32, other: u32, other_key: bool) {
        let (one, other) = (self.root(one), self.root(other));
        if one == other {
            return;
        }
        let (root, below) = (one.min(other), one.max(other));
        self.parents[below as usize] = root;
        if other_key || self.is_mixed(below) {
            self.mixed[root as usize / 64] |= 1 << (root % 64);
        }
    }

    fn is_mixed(&self, root: u32) -> bool {
        self.mixed[root as usize / 64] >> (root % 64) & 1 == 1
    }

    /// From now on roots are found without a search.
    pub fn flatten(&mut self) {
        // A parent has a smaller number, and is flat already.
        for row in 0..self.parents.len() {
            self.parents[row] = self.parents[self.parents[row] as usize];
        }
    }

    /// The root of a row's set, if its rows have several keys. Of flat sets.
    pub fn mixed_root(&self, row: u32) -> Option<u32> {
        let root = self.parents[row as usize];
        self.is_mixed(root).then_some(root)
    }

    /// The roots of the sets whose rows have several keys, ascending. Of flat sets.
    pub fn mixed_roots(&self) -> Vec<u32> {
        let roots = (0u32..).zip(&self.parents).filter(|(row, parent)| row == *parent);
        roots.map(|(row, _)| row).filter(|row| self.is_mixed(*row)).collect()
    }
}
