//! Reads n-gram models in the ARPA format, over token ids as NeMo writes them.

use std::io::{BufRead, BufReader, Read};
use std::path::Path;

use super::TOKEN_OFFSET;
use super::acceptor::{Arc, Backoff, BackoffAcceptor};
use super::estimate::MAX_ORDER;
use super::open_regular_file;
use crate::{Error, Result};

/// Longest line, in bytes.
const LONGEST_LINE: u64 = 4096;

/// State after the mark of the beginning.
const BEGINNING: u32 = 1;

/// A word of an n-gram.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Symbol {
    Token(u32),
    Beginning,
    End,
    Unknown,
}

/// One line of an n-gram; weights in natural logarithms.
struct Line {
    symbols: Vec<Symbol>,
    weight: f32,
    backoff: f32,
}

/// An arc with the line that it came from and the back-off of the state it leads to.
struct Found {
    arc: Arc,
    backoff: Backoff,
    line: u64,
}

/// Reads an ARPA file whose words are token ids below `vocabulary`: token `i` is the character of code `100 + i`.
///
/// Scores are NeMo's (`NGramGPULanguageModel.from_arpa`): tokens that are no unigram of the file share the probability
/// of `<unk>` evenly. N-grams with `<unk>` in them, and with `<s>` or `</s>` inside, are never looked up and are left out.
///
/// # Errors
/// If the file cannot be read or is no such model: the line is named.
pub fn read_arpa(path: &Path, vocabulary: usize) -> Result<BackoffAcceptor> {
    let file = open_regular_file(path).map_err(|source| Error::Io {
        path: path.into(),
        source,
    })?;
    parse_arpa(BufReader::new(file), vocabulary).map_err(|what| Error::File {
        path: path.into(),
        what,
    })
}

/// [`read_arpa`] of text from a reader. An error says what is wrong in which line.
pub fn parse_arpa(reader: impl BufRead, vocabulary: usize) -> std::result::Result<BackoffAcceptor, String> {
    let mut lines = Lines {
        reader,
        number: 0,
        text: String::new(),
    };
    let counts = lines.header()?;
    let mut states = States::new(vocabulary);
    for (index, &count) in counts.iter().enumerate() {
        let order = index + 1;
        let is_last = order == counts.len();
        let heading = format!("\\{order}-grams:");
        lines.skip_empty()?;
        if lines.text != heading {
            return Err(lines.wrong(&format!("`{heading}` is expected")));
        }
        let mut found = 0u64;
        while lines.advance()? && !lines.text.is_empty() && !lines.text.starts_with('\\') {
            found += 1;
            let line = lines.ngram(order, vocabulary)?;
            let added = states.add(&line, lines.number, is_last);
            added.map_err(|what| lines.wrong(&what))?;
        }
        if found != count {
            return Err(lines.wrong(&format!("{found} {order}-grams end here, and the header says {count}")));
        }
        states.finish_order(is_last)?;
    }
    lines.skip_empty()?;
    if lines.text != "\\end\\" {
        return Err(lines.wrong("`\\end\\` is expected"));
    }
    states.acceptor()
}

struct Lines<R> {
    reader: R,
    /// Of the line in `text`, from 1.
    number: u64,
    text: String,
}

impl<R: BufRead> Lines<R> {
    fn wrong(&self, what: &str) -> String {
        format!("line {}: {what}", self.number)
    }

    /// Reads the next line, without its ending; false at the end of the file, where the line is empty.
    fn advance(&mut self) -> std::result::Result<bool, String> {
        let mut bytes = std::mem::take(&mut self.text).into_bytes();
        bytes.clear();
        self.number += 1;
        let read = self
            .reader
            .by_ref()
            .take(LONGEST_LINE + 1)
            .read_until(b'\n', &mut bytes);
        let read = read.map_err(|error| self.wrong(&error.to_string()))?;
        if bytes.last() == Some(&b'\n') {
            bytes.pop();
            if bytes.last() == Some(&b'\r') {
                bytes.pop();
            }
        } else if bytes.len() as u64 > LONGEST_LINE {
            return Err(self.wrong(&format!("longer than {LONGEST_LINE} bytes")));
        }
        self.text = String::from_utf8(bytes).map_err(|_| self.wrong("not UTF-8"))?;
        Ok(read > 0)
    }

    /// Moves to the next line that is not empty, beginning with the current one.
    fn skip_empty(&mut self) -> std::result::Result<(), String> {
        while self.text.trim_ascii().is_empty() {
            if !self.advance()? {
                return Err(self.wrong("the file ends here"));
            }
        }
        Ok(())
    }

    /// The numbers of n-grams, by order.
    fn header(&mut self) -> std::result::Result<Vec<u64>, String> {
        self.skip_empty()?;
        if self.text.trim_ascii() != "\\data\\" {
            return Err(self.wrong("no ARPA file: `\\data\\` is expected"));
        }
        let mut counts = Vec::new();
        while self.advance()? && !self.text.is_empty() && !self.text.starts_with('\\') {
            let count = self.text.strip_prefix("ngram ").and_then(|rest| rest.split_once('='));
            let count = count.and_then(|(order, count)| {
                let order = order.trim_ascii().parse::<usize>().ok()?;
                Some((order, count.trim_ascii().parse::<u64>().ok()?))
            });
            match count {
                Some((order, count)) if order == counts.len() + 1 => counts.push(count),
                _ => return Err(self.wrong(&format!("`ngram {}=COUNT` is expected", counts.len() + 1))),
            }
            if counts.len() > MAX_ORDER {
                return Err(self.wrong(&format!("orders up to {MAX_ORDER} are known")));
            }
        }
        if counts.is_empty() {
            return Err(self.wrong("the header names no n-grams"));
        }
        Ok(counts)
    }

    /// Parses the current line as an n-gram.
    fn ngram(&self, order: usize, vocabulary: usize) -> std::result::Result<Line, String> {
        let number = |text: &str| {
            let value = text.parse::<f64>().ok().filter(|value| value.is_finite());
            let value = value.map(|value| (value * std::f64::consts::LN_10) as f32);
            value.ok_or_else(|| self.wrong(&format!("`{text}` is not a logarithm")))
        };
        let mut fields = self.text.split('\t');
        let (Some(weight), Some(words)) = (fields.next(), fields.next()) else {
            return Err(self.wrong("a logarithm, a tab and tokens are expected"));
        };
        let weight = number(weight)?;
        if weight > 1e-3 {
            return Err(self.wrong(&format!("the logarithm of a probability is above 0: {weight}")));
        }
        let backoff = fields.next().map_or(Ok(0.0), number)?;
        if fields.next().is_some() {
            return Err(self.wrong("more than three fields"));
        }
        let symbols = words.split(' ').map(|word| self.symbol(word, vocabulary));
        let symbols: Vec<Symbol> = symbols.collect::<std::result::Result<_, _>>()?;
        if symbols.len() != order {
            return Err(self.wrong(&format!("{} tokens in a {order}-gram", symbols.len())));
        }
        Ok(Line {
            symbols,
            weight,
            backoff,
        })
    }

    fn symbol(&self, word: &str, vocabulary: usize) -> std::result::Result<Symbol, String> {
        match word {
            "<s>" => return Ok(Symbol::Beginning),
            "</s>" => return Ok(Symbol::End),
            "<unk>" => return Ok(Symbol::Unknown),
            _ => {}
        }
        let mut characters = word.chars();
        let token = match (characters.next(), characters.next()) {
            (Some(character), None) => u32::from(character).checked_sub(TOKEN_OFFSET),
            _ => None,
        };
        let Some(token) = token else {
            let what = format!(
                "`{word}` is not a token: token i is the character of code {TOKEN_OFFSET} + i, as `flow lm build` and NeMo write it"
            );
            return Err(self.wrong(&what));
        };
        if token as usize >= vocabulary {
            let what = format!("token {token} is not below {vocabulary}: this is a model of another tokenizer");
            return Err(self.wrong(&what));
        }
        Ok(Symbol::Token(token))
    }
}

/// The acceptor while it is read, order by order. State 0 is the start state, 1 the one after `<s>`.
struct States {
    start: Vec<Option<(f32, u32)>>,
    unknown: f32,
    backoffs: Vec<Backoff>,
    /// Of all orders but the one that is read, sorted: later orders leave later states.
    arcs: Vec<Arc>,
    /// Of the order that is read.
    found: Vec<Found>,
}

impl States {
    fn new(vocabulary: usize) -> Self {
        let none = Backoff {
            target: 0,
            weight: 0.0,
            end: None,
        };
        States {
            start: vec![None; vocabulary],
            unknown: f32::NEG_INFINITY,
            backoffs: vec![none; 2],
            arcs: Vec::new(),
            found: Vec::new(),
        }
    }

    fn add(&mut self, ngram: &Line, line: u64, is_last: bool) -> std::result::Result<(), String> {
        let Some((&last, history)) = ngram.symbols.split_last() else {
            return Err("no tokens".into());
        };
        if history.is_empty() {
            return self.add_unigram(last, ngram);
        }
        let inside = |symbol: &Symbol| !matches!(symbol, Symbol::Token(_));
        if history[0] == Symbol::Unknown
            || history[0] == Symbol::End
            || history[1..].iter().any(inside)
            || matches!(last, Symbol::Unknown | Symbol::Beginning)
        {
            return Ok(());
        }
        let Some(from) = self.state(history) else {
            return Err("the n-gram before the last token is missing".into());
        };
        let token = match last {
            Symbol::Token(token) => token,
            _ => {
                let end = &mut self.backoffs[from as usize].end;
                return match end.replace(ngram.weight) {
                    None => Ok(()),
                    Some(_) => Err("this n-gram appears twice".into()),
                };
            }
        };
        let target = self.longest_suffix(&ngram.symbols[1..]);
        self.found.push(Found {
            arc: Arc {
                from,
                token,
                weight: ngram.weight,
                // N-grams below the highest order get a state, which is numbered when all of the order are read.
                target: if is_last { target } else { 0 },
            },
            backoff: Backoff {
                target,
                weight: ngram.backoff,
                end: None,
            },
            line,
        });
        Ok(())
    }

    fn add_unigram(&mut self, symbol: Symbol, ngram: &Line) -> std::result::Result<(), String> {
        let twice = || Err("this n-gram appears twice".to_owned());
        match symbol {
            Symbol::Unknown => self.unknown = ngram.weight,
            Symbol::Beginning => self.backoffs[BEGINNING as usize].weight = ngram.backoff,
            Symbol::End => {
                if self.backoffs[0].end.replace(ngram.weight).is_some() {
                    return twice();
                }
            }
            Symbol::Token(token) => {
                let state = u32::try_from(self.backoffs.len()).map_err(|_| "too many n-grams")?;
                if self.start[token as usize].replace((ngram.weight, state)).is_some() {
                    return twice();
                }
                self.backoffs.push(Backoff {
                    target: 0,
                    weight: ngram.backoff,
                    end: None,
                });
            }
        }
        Ok(())
    }

    /// The state of a history of finished orders.
    fn state(&self, history: &[Symbol]) -> Option<u32> {
        let (first, rest) = history.split_first()?;
        let first = match first {
            Symbol::Beginning => BEGINNING,
            Symbol::Token(token) => self.start[*token as usize]?.1,
            Symbol::End | Symbol::Unknown => return None,
        };
        rest.iter().try_fold(first, |state, symbol| {
            let Symbol::Token(token) = symbol else { return None };
            let found = self
                .arcs
                .binary_search_by_key(&(state, *token), |arc| (arc.from, arc.token));
            Some(self.arcs[found.ok()?].target)
        })
    }

    /// The state of the longest end of these tokens that has one.
    fn longest_suffix(&self, symbols: &[Symbol]) -> u32 {
        (0..symbols.len())
            .find_map(|skipped| self.state(&symbols[skipped..]))
            .unwrap_or(0)
    }

    /// Numbers the states of an order whose n-grams were all added.
    fn finish_order(&mut self, is_last: bool) -> std::result::Result<(), String> {
        let mut found = std::mem::take(&mut self.found);
        found.sort_by_key(|found| (found.arc.from, found.arc.token));
        for pair in found.windows(2) {
            if (pair[0].arc.from, pair[0].arc.token) == (pair[1].arc.from, pair[1].arc.token) {
                return Err(format!("line {}: this n-gram appears twice", pair[1].line));
            }
        }
        for mut found in found {
            if !is_last {
                found.arc.target = u32::try_from(self.backoffs.len()).map_err(|_| "too many n-grams")?;
                self.backoffs.push(found.backoff);
            }
            self.arcs.push(found.arc);
        }
        Ok(())
    }

    fn acceptor(self) -> std::result::Result<BackoffAcceptor, String> {
        let unseen = self.start.iter().filter(|arc| arc.is_none()).count();
        let unseen_weight = if unseen > 1 {
            (f64::from(self.unknown) - (unseen as f64).ln()) as f32
        } else {
            self.unknown
        };
        let start = self.start.into_iter().map(|arc| arc.unwrap_or((unseen_weight, 0)));
        let start = start.collect();
        BackoffAcceptor::new(BEGINNING, start, self.backoffs, &self.arcs).map_err(|error| error.to_string())
    }
}
