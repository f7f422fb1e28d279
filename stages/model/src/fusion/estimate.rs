//! Estimates n-gram models from token sequences, with Witten-Bell smoothing, and writes them as ARPA files.

use std::io::{self, Write};

use super::TOKEN_OFFSET;
use crate::{Error, Result};

/// Highest order of n-gram models, here and in files.
pub const MAX_ORDER: usize = 16;

/// Marks of the beginning and the end of a sequence: numbers above all token ids.
const BEGINNING: u32 = u32::MAX - 1;
const END: u32 = u32::MAX;

/// Token sequences that a model is estimated from, with a mark at either end of each.
#[derive(Debug, Clone, Default)]
pub struct Corpus {
    symbols: Vec<u32>,
    sequences: usize,
}

impl Corpus {
    /// Adds a sequence; an empty one counts as nothing.
    ///
    /// # Errors
    /// If a token has no character in an ARPA file, or there are too many tokens.
    pub fn add(&mut self, tokens: &[u32]) -> Result<()> {
        if tokens.is_empty() {
            return Ok(());
        }
        if let Some(token) = tokens.iter().find(|token| character(**token).is_none()) {
            return Err(Error::Input(format!("token {token} has no character in ARPA files")));
        }
        if self.symbols.len() + tokens.len() + 2 > u32::MAX as usize {
            return Err(Error::Input("more than 4294967295 tokens".into()));
        }
        self.symbols.push(BEGINNING);
        self.symbols.extend_from_slice(tokens);
        self.symbols.push(END);
        self.sequences += 1;
        Ok(())
    }

    /// Number of sequences.
    pub fn sequences(&self) -> usize {
        self.sequences
    }

    /// Number of tokens, without the marks.
    pub fn tokens(&self) -> usize {
        self.symbols.len() - 2 * self.sequences
    }

    /// The symbols from a place on, at most this many, up to the end of the sequence.
    fn window(&self, place: u32, order: usize) -> &[u32] {
        let rest = &self.symbols[place as usize..];
        let rest = &rest[..rest.len().min(order)];
        let end = rest.iter().position(|&symbol| symbol == END);
        &rest[..end.map_or(rest.len(), |end| end + 1)]
    }
}

fn character(token: u32) -> Option<char> {
    char::from_u32(token.checked_add(TOKEN_OFFSET)?)
}

/// An n-gram of the corpus.
struct Ngram {
    /// Index of its first occurrence in the sorted positions.
    place: u32,
    count: u64,
    /// Not its logarithm.
    probability: f64,
    /// Probability left for symbols that never followed; none where no symbol followed.
    backoff: Option<f64>,
}

/// Writes the interpolated Witten-Bell model of an order as an ARPA file, logarithms with seven digits:
///
/// `p(w | h) = (c(hw) + T(h) p(w | h')) / (c(h) + T(h))`, where `c` counts, `T(h)` is the number of different symbols
/// that follow `h`, and `h'` is `h` without its first symbol (Chen and Goodman, "An empirical study of smoothing techniques
/// for language modeling", 1998, section 2.6). Of a unigram, `T` goes to `<unk>`. Returns the number of n-grams of each order.
///
/// # Errors
/// If the order is not from 1 to [`MAX_ORDER`], the corpus is empty, or nothing can be written.
pub fn write_witten_bell(corpus: &Corpus, order: usize, out: &mut dyn Write) -> Result<Vec<usize>> {
    if !(1..=MAX_ORDER).contains(&order) {
        return Err(Error::Input(format!("order {order} is not from 1 to {MAX_ORDER}")));
    }
    if corpus.sequences == 0 {
        return Err(Error::Input("there is no text to count".into()));
    }
    // All n-grams of all orders are beginnings of these, in their order.
    let mut places: Vec<u32> = (0..corpus.symbols.len() as u32).collect();
    places.sort_unstable_by(|&a, &b| corpus.window(a, order).cmp(corpus.window(b, order)));
    let mut orders: Vec<Vec<Ngram>> = Vec::with_capacity(order);
    let (unigrams, unknown) = unigrams(corpus, &places);
    orders.push(unigrams);
    for length in 2..=order {
        let mut longer = count(corpus, &places, length);
        let shorter = orders.last_mut().expect("unigrams come first");
        interpolate(corpus, shorter, &mut longer, length);
        orders.push(longer);
    }
    write(corpus, &orders, unknown, out).map_err(|error| Error::Input(format!("cannot write: {error}")))?;
    let mut sizes: Vec<usize> = orders.iter().map(Vec::len).collect();
    // `<unk>`
    sizes[0] += 1;
    Ok(sizes)
}

/// The n-grams of a length, sorted.
fn count(corpus: &Corpus, places: &[u32], length: usize) -> Vec<Ngram> {
    let mut ngrams: Vec<Ngram> = Vec::new();
    for &place in places {
        let window = corpus.window(place, length);
        if window.len() < length {
            continue;
        }
        match ngrams.last_mut() {
            Some(last) if corpus.window(last.place, length) == window => last.count += 1,
            _ => ngrams.push(Ngram {
                place,
                count: 1,
                probability: 0.0,
                backoff: None,
            }),
        }
    }
    ngrams
}

/// The unigrams, and the probability of an unknown token.
fn unigrams(corpus: &Corpus, places: &[u32]) -> (Vec<Ngram>, f64) {
    let mut ngrams = count(corpus, places, 1);
    let symbol = |ngram: &Ngram| corpus.symbols[ngram.place as usize];
    let follow = ngrams.iter().filter(|ngram| symbol(ngram) != BEGINNING);
    let (types, total) = follow.fold((0.0, 0.0), |(types, total), ngram| {
        (types + 1.0, total + ngram.count as f64)
    });
    for ngram in &mut ngrams {
        ngram.probability = if symbol(ngram) == BEGINNING {
            0.0
        } else {
            ngram.count as f64 / (total + types)
        };
    }
    (ngrams, types / (total + types))
}

/// The probabilities of n-grams of a length from those of the next shorter ones, which get their back-offs.
fn interpolate(corpus: &Corpus, shorter: &mut [Ngram], longer: &mut [Ngram], length: usize) {
    let find = |shorter: &[Ngram], symbols: &[u32]| {
        shorter
            .binary_search_by(|ngram| corpus.window(ngram.place, length - 1).cmp(symbols))
            .expect("the parts of an n-gram are n-grams")
    };
    let history = |ngram: &Ngram| &corpus.window(ngram.place, length)[..length - 1];
    for group in longer.chunk_by_mut(|a, b| history(a) == history(b)) {
        let types = group.len() as f64;
        let total: f64 = group.iter().map(|ngram| ngram.count as f64).sum();
        for ngram in group.iter_mut() {
            let lower = &shorter[find(shorter, &corpus.window(ngram.place, length)[1..])];
            ngram.probability = (ngram.count as f64 + types * lower.probability) / (total + types);
        }
        let history = find(shorter, history(&group[0]));
        shorter[history].backoff = Some(types / (total + types));
    }
}

fn write(corpus: &Corpus, orders: &[Vec<Ngram>], unknown: f64, out: &mut dyn Write) -> io::Result<()> {
    writeln!(out, "\\data\\")?;
    for (index, ngrams) in orders.iter().enumerate() {
        let unknown = usize::from(index == 0);
        writeln!(out, "ngram {}={}", index + 1, ngrams.len() + unknown)?;
    }
    for (index, ngrams) in orders.iter().enumerate() {
        writeln!(out, "\n\\{}-grams:", index + 1)?;
        if index == 0 {
            writeln!(out, "{:.7}\t<unk>", unknown.log10())?;
        }
        for ngram in ngrams {
            let probability = if ngram.probability > 0.0 {
                ngram.probability.log10()
            } else {
                -99.0
            };
            write!(out, "{probability:.7}\t")?;
            for (place, &symbol) in corpus.window(ngram.place, index + 1).iter().enumerate() {
                let space = if place > 0 { " " } else { "" };
                match (symbol, character(symbol)) {
                    (BEGINNING, _) => write!(out, "{space}<s>")?,
                    (END, _) => write!(out, "{space}</s>")?,
                    (_, Some(character)) => write!(out, "{space}{character}")?,
                    (_, None) => return Err(io::Error::other("a token without a character")),
                }
            }
            match ngram.backoff {
                Some(backoff) => writeln!(out, "\t{:.7}", backoff.log10())?,
                None => writeln!(out)?,
            }
        }
    }
    writeln!(out, "\n\\end\\")
}
