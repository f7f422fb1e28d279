//! Chooses whole groups of rows, class by class, in the order of the groups' keys.

use std::collections::{BTreeMap, HashMap};

use arrow::array::Array;
use rayon::prelude::*;

use super::components::Components;
use super::external_sort::{Record, Sorter, u32_at, u64_at};
use super::{ChoiceRows, Decided, Ended, GroupChoice, GroupKey, Resources, for_each_partition};
use flow_base::error::StageError;
use flow_base::partition::Partition;
use flow_store::Artifact;

/// Bytes of a name that is held: a guess.
const NAME_BYTES: u64 = 150;

/// A row by the key of its group.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Row {
    key: GroupKey,
    /// The place of its class among all, by name.
    class: u32,
    /// The place of its partition.
    partition: u32,
    number: u32,
}

impl Record for Row {
    const BYTES: usize = 28;

    fn write(&self, bytes: &mut Vec<u8>) {
        bytes.extend(self.key.0.to_le_bytes());
        bytes.extend(self.key.1.to_le_bytes());
        for number in [self.class, self.partition, self.number] {
            bytes.extend(number.to_le_bytes());
        }
    }

    fn read(bytes: &[u8]) -> Self {
        Row {
            key: (u64_at(bytes, 0), u64_at(bytes, 8)),
            class: u32_at(bytes, 16),
            partition: u32_at(bytes, 20),
            number: u32_at(bytes, 24),
        }
    }
}

/// A row by one of its keys; rows are counted over all partitions.
type Keyed = (GroupKey, u32);

impl Record for Keyed {
    const BYTES: usize = 20;

    fn write(&self, bytes: &mut Vec<u8>) {
        bytes.extend(self.0.0.to_le_bytes());
        bytes.extend(self.0.1.to_le_bytes());
        bytes.extend(self.1.to_le_bytes());
    }

    fn read(bytes: &[u8]) -> Self {
        ((u64_at(bytes, 0), u64_at(bytes, 8)), u32_at(bytes, 16))
    }
}

/// Classes by name, with their rows.
#[derive(Default)]
struct Classes {
    names: Vec<String>,
    rows: Vec<u64>,
}

impl Classes {
    fn place(&self, name: &str) -> Result<u32, StageError> {
        let place = self.names.binary_search_by(|own| own.as_str().cmp(name)).ok();
        let place = place.and_then(|place| u32::try_from(place).ok());
        place.ok_or_else(|| StageError::failed(format!("rows of the class {name} were not counted")))
    }
}

/// Key rows are read twice, and once or twice more where rows are tied: rows are counted first, and of these only the likely ones
/// sorted.
pub(super) fn decide(choice: &dyn GroupChoice, keys: &Artifact, resources: &Resources) -> Result<Decided, Ended> {
    let mut firsts = Vec::with_capacity(keys.partitions().len());
    let mut rows = 0;
    for partition in keys.partitions() {
        firsts.push(rows);
        rows += keys.rows_of(partition).unwrap_or_default();
    }
    let (classes, components) = count(choice, keys, &firsts, resources)?;
    let quotas: Vec<u64> = classes.rows.iter().map(|rows| choice.quota(*rows)).collect();
    let mut of_classes: BTreeMap<String, (u64, u64)> = BTreeMap::new();
    for (name, rows) in classes.names.iter().zip(&classes.rows) {
        of_classes.insert(name.clone(), (*rows, 0));
    }
    if quotas.iter().all(|quota| *quota == 0) {
        return Ok(Decided {
            decisions: Vec::new(),
            classes: of_classes,
        });
    }
    let tied = match components {
        Some(components) => Some(name(choice, keys, &firsts, components, resources)?),
        None => None,
    };
    let mut last = likely_last(&classes.rows, &quotas);
    let mut chosen = loop {
        let (chosen, is_met) = take(choice, keys, &firsts, &classes, tied.as_ref(), last, &quotas, resources)?;
        // Rows behind the one that met the last quota are not chosen.
        if is_met || last == u64::MAX {
            break chosen;
        }
        last = u64::MAX;
    };
    for (.., class) in &chosen {
        if let Some((_, chosen)) = of_classes.get_mut(&classes.names[*class as usize]) {
            *chosen += 1;
        }
    }
    chosen.par_sort_unstable();
    let partitions: Vec<&Partition> = keys.partitions().collect();
    let of_partition = chosen.chunk_by(|one, other| one.0 == other.0).map(|rows| {
        let numbers = rows.iter().map(|(_, number, _)| *number).collect();
        Ok((partitions[rows[0].0 as usize].clone(), choice.decisions(numbers)?))
    });
    Ok(Decided {
        decisions: of_partition.collect::<Result<_, StageError>>()?,
        classes: of_classes,
    })
}

/// The rows of a partition, as many as it has.
fn rows_of(choice: &dyn GroupChoice, partition: &Partition, keys: &Artifact) -> Result<ChoiceRows, StageError> {
    let rows = choice.rows(partition, keys)?;
    let counts = [rows.keys.len(), rows.classes.len(), rows.numbers.len()];
    let stored = keys.rows_of(partition).unwrap_or_default();
    let ties_fit = rows.ties.len() == choice.ties() && rows.ties.iter().all(|ties| ties.len() == rows.keys.len());
    if counts.iter().any(|count| *count as u64 != stored) || !ties_fit {
        return Err(StageError::failed(format!(
            "it gave {} keys, {} classes and {} numbers of the {stored} rows of {partition}",
            counts[0], counts[1], counts[2]
        )));
    }
    if let Some(class) = rows.classes.iter().find(|class| **class as usize >= rows.names.len()) {
        return Err(StageError::failed(format!(
            "a row of {partition} has the class {class}, which has no name"
        )));
    }
    Ok(rows)
}

/// Rows that share a key, or one of the ties.
struct Family {
    sorter: Sorter<Keyed>,
    /// Whether a row has the key of the one before it, a bit each: most rows of a recording are next to each other. Such a row is
    /// not sorted.
    as_before: Vec<u64>,
}

impl Family {
    /// Adds the rows of a partition, of which the first is `first`.
    fn extend(&mut self, first: u32, keys: impl IntoIterator<Item = Option<GroupKey>>) -> Result<(), StageError> {
        let mut before = None;
        for (row, key) in (first..).zip(keys) {
            match key {
                Some(_) if key == before => {
                    let word = row as usize / 64;
                    if word >= self.as_before.len() {
                        self.as_before.resize(word + 1, 0);
                    }
                    self.as_before[word] |= 1 << (row % 64);
                }
                Some(key) => self.sorter.extend([(key, row)])?,
                None => {}
            }
            before = key;
        }
        Ok(())
    }

    /// Joins the rows that share a key.
    fn join(self, components: &mut Components, other_key: bool, resources: &Resources) -> Result<(), Ended> {
        for (word, bits) in (0u32..).zip(self.as_before) {
            let mut left = bits;
            while left != 0 {
                let row = word * 64 + left.trailing_zeros();
                components.join(row - 1, row, other_key);
                left &= left - 1;
            }
        }
        let mut before: Option<Keyed> = None;
        for (looked_at, row) in (0u64..).zip(self.sorter.finish()?) {
            let (key, row) = row?;
            if let Some((_, last)) = before.filter(|(last, _)| *last == key) {
                components.join(last, row, other_key);
            }
            before = Some((key, row));
            if looked_at.is_multiple_of(1 << 20) {
                resources.go_on()?;
            }
        }
        Ok(())
    }
}

/// Counts the rows of each class, and connects rows that share a key or a tie.
fn count(
    choice: &dyn GroupChoice,
    keys: &Artifact,
    firsts: &[u64],
    resources: &Resources,
) -> Result<(Classes, Option<Components>), Ended> {
    let mut counts: HashMap<String, u64> = HashMap::new();
    let families = match choice.ties() {
        0 => 0,
        ties => ties + 1,
    };
    // Beside them there are 4 bytes and some bits a row.
    let memory = resources.memory / 2 / families.max(1) as u64;
    let mut families: Vec<Family> = (0..families)
        .map(|_| Family {
            sorter: Sorter::new(memory, keys.rows(), &resources.scratch),
            as_before: Vec::new(),
        })
        .collect();
    let mut components = match families.is_empty() {
        true => None,
        false => Some(Components::new(keys.rows())?),
    };
    for_each_partition(
        keys,
        resources,
        |_, partition| {
            let mut rows = rows_of(choice, partition, keys)?;
            let mut counts = vec![0u64; rows.names.len()];
            for class in &rows.classes {
                counts[*class as usize] += 1;
            }
            let names = std::mem::take(&mut rows.names);
            let keys = (choice.ties() > 0).then_some((rows.keys, rows.ties));
            Ok((names.into_iter().zip(counts).collect::<Vec<_>>(), keys))
        },
        |place, (of_partition, rows)| {
            for (name, rows) in of_partition {
                *counts.entry(name).or_default() += rows;
            }
            let Some((keys, ties)) = rows else { return Ok(()) };
            // `Components` checked that 32 bits suffice.
            let first = firsts[place as usize] as u32;
            let Some((of_keys, of_ties)) = families.split_first_mut() else {
                return Ok(());
            };
            of_keys.extend(first, keys.into_iter().map(Some))?;
            for (family, ties) in of_ties.iter_mut().zip(ties) {
                family.extend(first, ties)?;
            }
            Ok(())
        },
    )?;
    for (number, family) in families.into_iter().enumerate() {
        let Some(components) = &mut components else { break };
        family.join(components, number > 0, resources)?;
    }
    let mut counts: Vec<(String, u64)> = counts.into_iter().collect();
    counts.sort_unstable();
    let (names, rows) = counts.into_iter().unzip();
    Ok((Classes { names, rows }, components))
}

/// The keys of groups of tied rows.
struct Tied {
    components: Components,
    /// Of the groups whose rows have several keys: their roots, ascending, and their keys.
    roots: Vec<u32>,
    keys: Vec<GroupKey>,
}

impl Tied {
    /// The key of the group of a row, which has `own` itself.
    fn key(&self, row: u32, own: GroupKey) -> GroupKey {
        let root = self.components.mixed_root(row);
        let place = root.and_then(|root| self.roots.binary_search(&root).ok());
        place.map_or(own, |place| self.keys[place])
    }
}

/// Finds the smallest name of each group whose rows have several keys; of as many groups at a time as their names fit in memory.
fn name(
    choice: &dyn GroupChoice,
    keys: &Artifact,
    firsts: &[u64],
    mut components: Components,
    resources: &Resources,
) -> Result<Tied, Ended> {
    components.flatten();
    let roots = components.mixed_roots();
    let at_a_time = usize::try_from(resources.memory / 2 / NAME_BYTES).unwrap_or(usize::MAX);
    let mut of_groups = Vec::with_capacity(roots.len());
    for some in roots.chunks(at_a_time.max(1)) {
        let mut smallest: Vec<Option<Box<str>>> = vec![None; some.len()];
        for_each_partition(
            keys,
            resources,
            |place, partition| {
                let names = choice.names(partition, keys)?;
                let mut own: HashMap<usize, &str> = HashMap::new();
                // `Components` checked that 32 bits suffice.
                for (row, at) in (firsts[place as usize] as u32..).zip(0..names.len()) {
                    let root = components.mixed_root(row);
                    let Some(group) = root.and_then(|root| some.binary_search(&root).ok()) else {
                        continue;
                    };
                    let name = if names.is_valid(at) { names.value(at) } else { "" };
                    let smallest = own.entry(group).or_insert(name);
                    *smallest = (*smallest).min(name);
                }
                Ok(own
                    .into_iter()
                    .map(|(group, name)| (group, Box::<str>::from(name)))
                    .collect::<Vec<_>>())
            },
            |_, own| {
                for (group, name) in own {
                    let smallest = &mut smallest[group];
                    if smallest.as_ref().is_none_or(|smallest| name < *smallest) {
                        *smallest = Some(name);
                    }
                }
                Ok(())
            },
        )?;
        let names = smallest
            .par_iter()
            .map(|name| choice.key_of(name.as_deref().unwrap_or_default()));
        of_groups.par_extend(names);
    }
    Ok(Tied {
        components,
        roots,
        keys: of_groups,
    })
}

/// Place of a partition, number and class of a row.
type Chosen = (u32, u32, u32);

/// Chooses among the rows up to `last` in the order of the keys, and says whether the quotas were met.
#[expect(clippy::too_many_arguments, reason = "what a choice consists of")]
fn take(
    choice: &dyn GroupChoice,
    keys: &Artifact,
    firsts: &[u64],
    classes: &Classes,
    tied: Option<&Tied>,
    last: u64,
    quotas: &[u64],
    resources: &Resources,
) -> Result<(Vec<Chosen>, bool), Ended> {
    let likely = (keys.rows() as f64 * (last as f64 / u64::MAX as f64) * 1.1) as u64;
    let mut sorter = Sorter::<Row>::new(resources.memory / 2, likely.min(keys.rows()), &resources.scratch);
    for_each_partition(
        keys,
        resources,
        |place, partition| {
            let rows = rows_of(choice, partition, keys)?;
            let places = rows.names.iter().map(|name| classes.place(name));
            let places: Vec<u32> = places.collect::<Result<_, _>>()?;
            let mut wanted = Vec::new();
            let first = firsts[place as usize];
            for (at, ((own, class), number)) in rows.keys.iter().zip(&rows.classes).zip(&rows.numbers).enumerate() {
                let key = match tied {
                    // `Components` checked that 32 bits suffice.
                    Some(tied) => tied.key((first + at as u64) as u32, *own),
                    None => *own,
                };
                if key.0 <= last {
                    wanted.push(Row {
                        key,
                        class: places[*class as usize],
                        partition: place,
                        number: *number,
                    });
                }
            }
            Ok(wanted)
        },
        |_, wanted| sorter.extend(wanted),
    )?;
    let mut taker = Taker::new(quotas);
    for (looked_at, row) in (0u64..).zip(sorter.finish()?) {
        taker.add(row?);
        if taker.left == 0 {
            break;
        }
        if looked_at.is_multiple_of(1 << 20) {
            resources.go_on()?;
        }
    }
    taker.end_group();
    Ok((taker.chosen, taker.left == 0))
}

/// Takes rows in the order of their keys, and chooses each group that has no more rows than its class still misses.
struct Taker {
    /// By class, rows that it still takes.
    missing: Vec<u64>,
    /// Rows that all classes together still take.
    left: u64,
    group: Option<Group>,
    chosen: Vec<Chosen>,
}

struct Group {
    key: GroupKey,
    /// Its smallest class.
    class: u32,
    rows: u64,
    /// Those rows; none once there are more than are left to take.
    held: Vec<Chosen>,
}

impl Taker {
    fn new(quotas: &[u64]) -> Self {
        Taker {
            missing: quotas.to_vec(),
            left: quotas.iter().fold(0, |sum, quota| sum.saturating_add(*quota)),
            group: None,
            chosen: Vec::new(),
        }
    }

    fn add(&mut self, row: Row) {
        if self.group.as_ref().is_some_and(|group| group.key != row.key) {
            self.end_group();
        }
        let group = self.group.get_or_insert_with(|| Group {
            key: row.key,
            class: row.class,
            rows: 0,
            held: Vec::new(),
        });
        group.class = group.class.min(row.class);
        group.rows += 1;
        match group.rows <= self.left {
            true => group.held.push((row.partition, row.number, row.class)),
            false => group.held = Vec::new(),
        }
    }

    fn end_group(&mut self) {
        let Some(group) = self.group.take() else { return };
        let missing = &mut self.missing[group.class as usize];
        if group.rows <= *missing {
            *missing -= group.rows;
            self.left -= group.rows;
            self.chosen.extend(group.held);
        }
    }
}

/// A first half of a key, of which all values are as likely, before which all quotas are probably met: each class has four times
/// as many rows there as it needs, and some. `rows` and `quotas` are those of the classes.
fn likely_last(rows: &[u64], quotas: &[u64]) -> u64 {
    const SOME: f64 = 16.0;
    let shares = rows.iter().zip(quotas).filter(|(_, quota)| **quota > 0);
    let shares = shares.map(|(rows, quota)| (4.0 * *quota as f64 + SOME) / *rows as f64);
    // A number that is too large becomes the largest one.
    (shares.fold(0.0, f64::max) * 2f64.powi(64)) as u64
}
