//! The languages of the rows, and what they weigh.

use crate::error::SamplingError;

/// The languages of all rows: a code per row, codes in order of first appearance.
#[derive(Clone, Debug, Default)]
pub struct Languages {
    names: Vec<String>,
    codes: Vec<u16>,
    by_name: std::collections::HashMap<String, u16>,
}

impl Languages {
    /// Adds the next row.
    pub fn push(&mut self, name: &str) -> Result<(), SamplingError> {
        let code = match self.by_name.get(name) {
            Some(&code) => code,
            None => {
                let code = u16::try_from(self.names.len()).map_err(|_| SamplingError::TooManyLanguages)?;
                self.names.push(name.to_owned());
                self.by_name.insert(name.to_owned(), code);
                code
            }
        };
        self.codes.push(code);
        Ok(())
    }

    /// The language of each row, as its place in [`Languages::names`].
    pub fn codes(&self) -> &[u16] {
        &self.codes
    }

    /// Names by code.
    pub fn names(&self) -> &[String] {
        &self.names
    }

    /// The language of a row.
    pub fn of_row(&self, row: usize) -> Option<&str> {
        self.names.get(usize::from(*self.codes.get(row)?)).map(String::as_str)
    }

    pub fn len(&self) -> usize {
        self.codes.len()
    }

    pub fn is_empty(&self) -> bool {
        self.codes.is_empty()
    }

    /// Rows of each language, by code.
    pub fn counts(&self) -> Vec<u64> {
        let mut counts = vec![0; self.names.len()];
        for &code in &self.codes {
            counts[usize::from(code)] += 1;
        }
        counts
    }

    /// The weight of a row of each language (by code): the share that `count^temperature` gives it over its
    /// share of the rows. Summed in order of first appearance, as Python's dictionary does.
    pub fn weights(&self, temperature: f64) -> Vec<f64> {
        let counts = self.counts();
        let total = self.codes.len() as f64;
        let powers: Vec<f64> = if temperature <= 0.0 {
            vec![1.0; counts.len()]
        } else {
            counts.iter().map(|&count| (count as f64).powf(temperature)).collect()
        };
        let mut sum = 0.0;
        for power in &powers {
            sum += power;
        }
        powers
            .iter()
            .zip(&counts)
            .map(|(power, &count)| (power / sum) / (count as f64 / total))
            .collect()
    }
}
