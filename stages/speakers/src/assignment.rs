//! The assignment problem: each row at most one column and each column at most one row, as many pairs as there can be, of
//! least total cost.

use crate::error::{Error, Result};

/// The column of each row of a cost matrix (rows, `columns`), by the Hungarian method with potentials: O(n² m) for n rows
/// or columns, whichever are fewer, and m of the others. Costs that are not finite are an error.
pub fn least_cost(costs: &[f64], columns: usize) -> Result<Vec<Option<usize>>> {
    if columns == 0 || !costs.len().is_multiple_of(columns) {
        let values = costs.len();
        return Err(Error::Input(format!(
            "{values} costs do not divide into rows of {columns}"
        )));
    }
    if costs.iter().any(|cost| !cost.is_finite()) {
        return Err(Error::Input("a cost of the assignment is not finite".into()));
    }
    let rows = costs.len() / columns;
    if rows <= columns {
        let found = smaller_side(rows, columns, |row, column| costs[row * columns + column]);
        return Ok(found.into_iter().map(Some).collect());
    }
    let mut assigned = vec![None; rows];
    let found = smaller_side(columns, rows, |column, row| costs[row * columns + column]);
    for (column, row) in found.into_iter().enumerate() {
        assigned[row] = Some(column);
    }
    Ok(assigned)
}

/// The column of each row where there are no more rows than columns: one row after another is added by the cheapest
/// path of changes, found by Dijkstra's algorithm on costs reduced by the potentials of row and column.
fn smaller_side(rows: usize, columns: usize, cost: impl Fn(usize, usize) -> f64) -> Vec<usize> {
    let mut row_potential = vec![0.0; rows];
    let mut column_potential = vec![0.0; columns];
    let mut row_of: Vec<Option<usize>> = vec![None; columns];
    for added in 0..rows {
        // For each column: the cheapest path to it, and the column before it on that path.
        let mut path = vec![f64::INFINITY; columns];
        let mut before: Vec<Option<usize>> = vec![None; columns];
        let mut done = vec![false; columns];
        let (mut row, mut from) = (added, None);
        let last = loop {
            let mut nearest = None;
            let mut least = f64::INFINITY;
            for column in (0..columns).filter(|&column| !done[column]) {
                let reduced = cost(row, column) - row_potential[row] - column_potential[column];
                if reduced < path[column] {
                    path[column] = reduced;
                    before[column] = from;
                }
                if nearest.is_none() || path[column] < least {
                    (nearest, least) = (Some(column), path[column]);
                }
            }
            let nearest = nearest.expect("a column is left: there are no more rows than columns");
            row_potential[added] += least;
            for column in 0..columns {
                if done[column] {
                    row_potential[row_of[column].expect("done columns have rows")] += least;
                    column_potential[column] -= least;
                } else {
                    path[column] -= least;
                }
            }
            done[nearest] = true;
            match row_of[nearest] {
                Some(next) => (row, from) = (next, Some(nearest)),
                None => break nearest,
            }
        };
        // Each column on the path takes the row of the one before it.
        let mut column = last;
        while let Some(previous) = before[column] {
            row_of[column] = row_of[previous];
            column = previous;
        }
        row_of[column] = Some(added);
    }
    let mut column_of = vec![0; rows];
    for (column, row) in row_of.into_iter().enumerate() {
        if let Some(row) = row {
            column_of[row] = column;
        }
    }
    column_of
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The least cost of all assignments, tried one by one.
    fn tried(costs: &[f64], columns: usize, row: usize, used: &mut Vec<bool>, skips: usize) -> f64 {
        if row == costs.len() / columns {
            return 0.0;
        }
        let mut least = f64::INFINITY;
        if skips > 0 {
            least = tried(costs, columns, row + 1, used, skips - 1);
        }
        for column in 0..columns {
            if !used[column] {
                used[column] = true;
                least = least.min(costs[row * columns + column] + tried(costs, columns, row + 1, used, skips));
                used[column] = false;
            }
        }
        least
    }

    #[test]
    fn no_other_assignment_costs_less() {
        let mut state = 7u64;
        for (rows, columns) in [(1, 1), (1, 4), (4, 1), (3, 3), (5, 5), (3, 6), (6, 3), (2, 5), (0, 3)] {
            for round in 0..40 {
                let costs: Vec<f64> = (0..rows * columns)
                    .map(|_| {
                        state = state
                            .wrapping_mul(6_364_136_223_846_793_005)
                            .wrapping_add(1_442_695_040_888_963_407);
                        let value = (state >> 40) as f64 / 1e5 - 80.0;
                        // In every other round with many equal costs.
                        if round % 2 == 0 { value } else { (value / 60.0).round() }
                    })
                    .collect();
                let found = least_cost(&costs, columns).unwrap();
                let pairs: Vec<(usize, usize)> = found
                    .iter()
                    .enumerate()
                    .filter_map(|(row, column)| column.map(|column| (row, column)))
                    .collect();
                assert_eq!((found.len(), pairs.len()), (rows, rows.min(columns)));
                let mut taken: Vec<usize> = pairs.iter().map(|pair| pair.1).collect();
                taken.sort_unstable();
                taken.dedup();
                assert_eq!(taken.len(), pairs.len());
                let total: f64 = pairs.iter().map(|(row, column)| costs[row * columns + column]).sum();
                let least = tried(
                    &costs,
                    columns,
                    0,
                    &mut vec![false; columns],
                    rows.saturating_sub(columns),
                );
                // Sums of at most six numbers below 200.
                assert!((total - least).abs() < 1e-9, "{rows} {columns}: {total}, not {least}");
            }
        }
        assert!(least_cost(&[1.0, f64::NAN], 2).is_err());
        assert!(least_cost(&[1.0, 2.0, 3.0], 2).is_err());
        assert!(least_cost(&[], 0).is_err());
    }
}
