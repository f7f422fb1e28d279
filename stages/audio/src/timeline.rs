//! Where in a recording the samples of a container belong: after silence where a recorder lost packets or began late, and only those
//! that an edit list presents. Times are then those that players show.

use std::collections::VecDeque;
use std::ops::Range;

use symphonia::core::units::TimeBase;

use crate::decode_fault::broken;
use crate::flac::Fault;
use crate::movie::Edit;

/// The shortest hole that is filled is so many to the second: times are rounded, and clocks of recorders differ a little.
const SHORTEST_HOLE: u64 = 10;
/// Most seconds of silence in a recording.
const MOST_SILENCE: u64 = 4 * 3_600;

/// What follows next in a recording.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Part {
    Silence(u64),
    /// Of the block that was decoded last.
    Frames(Range<u64>),
}

/// A part of what is presented, in frames.
#[derive(Debug, PartialEq, Eq)]
enum Piece {
    Silence(u64),
    Media(Range<u64>),
}

pub(crate) struct Timeline {
    tick: TimeBase,
    /// The time of the first frame, once it is known.
    origin: Option<i64>,
    /// From a time on, how much later it really is.
    shifts: Vec<(u64, i64)>,
    edits: Option<Edits>,
    /// What of these is not yet presented; none before the first block.
    pieces: Option<VecDeque<Piece>>,
    /// Frames so far, with holes and with what is not presented.
    frames: u64,
    /// Where the last packet ends, in frames.
    end: u64,
    /// Frames of silence so far.
    silence: u64,
}

/// An edit list that can be followed from the beginning of a track to its end.
pub(crate) struct Edits {
    list: Vec<Edit>,
    /// Ticks of a second in durations, and in places in the track.
    movie: u32,
    track: u32,
}

impl Edits {
    /// None where there is nothing to follow, or parts are repeated, come in another order, or at another speed.
    pub fn of(list: &[Edit], movie: u32, track: u32) -> Option<Edits> {
        let list = list.to_vec();
        let edits = Edits { list, movie, track };
        let is_known = !edits.list.is_empty() && movie > 0 && track > 0;
        let pieces = is_known.then(|| edits.pieces(track))?;
        let mut end = 0;
        for piece in &pieces {
            if let Piece::Media(range) = piece {
                if range.start < end {
                    return None;
                }
                end = range.end;
            }
        }
        (end > 0 && edits.list.iter().all(|edit| edit.is_plain)).then_some(edits)
    }

    /// Whether frames before the first one that is presented are left out.
    pub fn cut_the_beginning(&self) -> bool {
        let first = self.list.iter().find_map(|edit| edit.from);
        first.is_some_and(|from| from > 0)
    }

    /// Frames at a rate that are presented of a track of `length` frames.
    pub fn length(&self, rate: u32, length: u64) -> u64 {
        let pieces = self.pieces(rate);
        let lengths = pieces.iter().map(|piece| match piece {
            Piece::Silence(frames) => *frames,
            Piece::Media(range) => range.end.min(length).saturating_sub(range.start),
        });
        lengths.fold(0, u64::saturating_add)
    }

    fn pieces(&self, rate: u32) -> VecDeque<Piece> {
        let last = self.list.len().saturating_sub(1);
        let piece = |(place, edit): (usize, &Edit)| {
            let frames = scaled(edit.duration, rate, self.movie);
            let Some(from) = edit.from else {
                return (frames > 0).then_some(Piece::Silence(frames));
            };
            let start = scaled(from, rate, self.track);
            let end = if edit.duration == 0 && place == last {
                u64::MAX
            } else {
                start.saturating_add(frames)
            };
            (start < end).then_some(Piece::Media(start..end))
        };
        self.list.iter().enumerate().filter_map(piece).collect()
    }
}

fn silence_of(parts: &VecDeque<Part>) -> u64 {
    let silences = parts.iter().map(|part| match part {
        Part::Silence(frames) => *frames,
        Part::Frames(_) => 0,
    });
    silences.fold(0, u64::saturating_add)
}

/// Ticks as frames at a rate, to the nearest.
fn scaled(ticks: u64, rate: u32, scale: u32) -> u64 {
    let scale = u128::from(scale.max(1));
    let frames = (u128::from(ticks) * u128::from(rate) + scale / 2) / scale;
    u64::try_from(frames).unwrap_or(u64::MAX)
}

impl Timeline {
    /// Of a container that tells times in such ticks, from `origin` on or, if that is not known, from the first packet on.
    pub fn new(tick: TimeBase, origin: Option<i64>) -> Timeline {
        Timeline {
            tick,
            origin,
            shifts: Vec::new(),
            edits: None,
            pieces: None,
            frames: 0,
            end: 0,
            silence: 0,
        }
    }

    pub fn with_shifts(mut self, shifts: Vec<(u64, i64)>) -> Timeline {
        self.shifts = shifts;
        self
    }

    pub fn with_edits(mut self, edits: Option<Edits>) -> Timeline {
        self.edits = edits;
        self
    }

    /// Whether times are counted from the first packet, and it is not known yet.
    pub fn wants_origin(&self) -> bool {
        self.origin.is_none()
    }

    /// Notes the time of the first packet, in ticks of the length `tick`.
    pub fn set_origin(&mut self, time: i64, tick: TimeBase) {
        let own = self.tick;
        let time = i128::from(time).saturating_mul(i128::from(tick.numer.get()) * i128::from(own.denom.get()));
        let time = time.div_euclid(i128::from(tick.denom.get()) * i128::from(own.numer.get()));
        self.origin = i64::try_from(time).ok();
    }

    /// The frame that belongs to a time, at a rate.
    fn frame_at(&self, time: i64, rate: u32) -> u64 {
        let place = u64::try_from(time).unwrap_or(0);
        let shifts = self.shifts.partition_point(|(from, _)| *from <= place);
        let shift = shifts.checked_sub(1).map_or(0, |last| self.shifts[last].1);
        let since = i128::from(time) + i128::from(shift) - i128::from(self.origin.unwrap_or(0));
        let frames = since.saturating_mul(i128::from(self.tick.numer.get()) * i128::from(rate));
        let frames = frames / i128::from(self.tick.denom.get());
        u64::try_from(frames.max(0)).unwrap_or(u64::MAX)
    }

    /// Adds what follows to `parts`: a block of this many frames, of a packet at `time` that lasts `duration`. Returns the frames
    /// of silence in the place of packets that are missing before it; a late beginning does not count.
    ///
    /// # Errors
    /// Where that would be more silence than any recording has.
    pub fn add(
        &mut self,
        (time, duration): (i64, u64),
        frames: u64,
        rate: u32,
        parts: &mut VecDeque<Part>,
    ) -> Result<u64, Fault> {
        let is_first = self.frames == 0;
        let most = MOST_SILENCE * u64::from(rate);
        let mut hole = self.frame_at(time, rate).saturating_sub(self.frames);
        if is_first && hole > most {
            // The time of another track is none.
            self.origin = self.shifted(time);
            hole = 0;
        }
        if is_first && self.pieces.is_none() {
            self.pieces = self.edits.as_ref().map(|edits| edits.pieces(rate));
        }
        if hole.saturating_mul(SHORTEST_HOLE) > rate.into() {
            self.present(hole, true, parts);
        }
        let missing = if is_first { 0 } else { silence_of(parts) };
        self.present(frames, false, parts);
        let end = time.saturating_add_unsigned(duration);
        self.end = self.frames.max(self.frame_at(end, rate));
        let silence = silence_of(parts);
        self.silence = self.silence.saturating_add(silence);
        if self.silence > most {
            parts.clear();
            let seconds = silence / u64::from(rate.max(1));
            return Err(broken(format!("a hole of {seconds} s")));
        }
        Ok(missing)
    }

    fn shifted(&self, time: i64) -> Option<i64> {
        let place = u64::try_from(time).unwrap_or(0);
        let shift = self.shifts.iter().rev().find(|(from, _)| *from <= place);
        time.checked_add(shift.map_or(0, |(_, shift)| *shift))
    }

    /// Adds what is presented of the next frames.
    fn present(&mut self, frames: u64, is_silence: bool, parts: &mut VecDeque<Part>) {
        let start = self.frames;
        self.frames = start.saturating_add(frames);
        let part = |range: Range<u64>| match is_silence {
            true => Part::Silence(range.end - range.start),
            false => Part::Frames(range),
        };
        let Some(pieces) = &mut self.pieces else {
            if frames > 0 {
                parts.push_back(part(0..frames));
            }
            return;
        };
        while let Some(piece) = pieces.front() {
            match piece {
                Piece::Silence(frames) => parts.push_back(Part::Silence(*frames)),
                Piece::Media(range) => {
                    let (from, to) = (range.start.max(start), range.end.min(self.frames));
                    if from < to {
                        parts.push_back(part(from - start..to - start));
                    }
                    if range.end > self.frames {
                        break;
                    }
                }
            }
            pieces.pop_front();
        }
    }

    /// Whether all was given that an edit list presents.
    pub fn is_over(&self) -> bool {
        self.pieces.as_ref().is_some_and(VecDeque::is_empty)
    }

    /// Where the last packet ends, in frames of the track.
    pub fn end(&self) -> u64 {
        self.end
    }
}
