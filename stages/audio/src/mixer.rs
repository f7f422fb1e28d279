//! One channel of several.
//!
//! The mean of two channels, one of which is the other with its sign changed (a cable soldered the wrong way, a recorder of balanced
//! lines) is silence. Whether it is so is known from the beginning of the sound; then one channel is taken for the whole recording.

/// Which channels of a recording are used.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Channels {
    /// The mean of all; where they cancel each other out, one of them.
    #[default]
    Mix,
    /// One of them, counted from 0.
    One(u32),
}

/// The mean has lost the sound if it has less than this part of the energy that channels have on average. That of a voice which is on
/// one of eight channels alone has an eighth.
const LOST: f64 = 0.01;
/// A tenth of a second counts if its channels have at least this mean square: -60 dB.
const AUDIBLE: f64 = 1e-6;
/// This many of them decide.
const ENOUGH: u32 = 10;
/// This many samples of all channels are held until then, and no more than a tenth of a second beyond. Then fewer tenths decide; of
/// silence the mean is given, and the look goes on.
const MOST_HELD: usize = 1 << 22;

/// Makes one channel of those of a recording, which comes in pieces from its beginning on. How it is cut does not matter.
pub(crate) struct Mixer {
    channels: usize,
    decided: Decided,
    /// The frame of the recording that is given next.
    frame: u64,
    /// None once it is decided.
    look: Option<Look>,
}

/// What is made of the channels of a recording.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Decided {
    used: Channels,
    /// From this frame on; before it, in silence, it is the mean.
    since: u64,
}

impl Decided {
    /// What a user has to know of the mix that was asked for.
    pub fn note(self, asked: Channels) -> Option<String> {
        match self.used {
            Channels::One(channel) if asked == Channels::Mix => Some(format!(
                "its channels cancel each other out, as one has the opposite sign: number {} alone is decoded",
                channel + 1
            )),
            _ => None,
        }
    }
}

/// What is known of the beginning of a recording.
struct Look {
    /// Frames of a tenth of a second.
    cell: u64,
    held: Vec<i32>,
    /// Energies of each channel and of their mean in the tenth that is not complete yet, and in those that count.
    now: Energies,
    all: Energies,
    count: u32,
}

#[derive(Clone)]
struct Energies {
    frames: u64,
    of_channels: Vec<f64>,
    of_mean: f64,
}

impl Energies {
    fn new(channels: usize) -> Self {
        Energies {
            frames: 0,
            of_channels: vec![0.0; channels],
            of_mean: 0.0,
        }
    }

    /// Of the channels on average.
    fn mean(&self) -> f64 {
        self.of_channels.iter().sum::<f64>() / self.of_channels.len() as f64
    }

    fn add(&mut self, other: &Energies) {
        self.frames += other.frames;
        self.of_mean += other.of_mean;
        for (sum, energy) in self.of_channels.iter_mut().zip(&other.of_channels) {
            *sum += energy;
        }
    }
}

impl Look {
    fn new(channels: usize, rate: u32) -> Self {
        Look {
            cell: u64::from(rate / 10).max(1),
            held: Vec::new(),
            now: Energies::new(channels),
            all: Energies::new(channels),
            count: 0,
        }
    }

    /// Takes the samples up to the end of a tenth of a second, and returns how many these are and whether it is complete.
    fn add(&mut self, interleaved: &[i32]) -> (usize, bool) {
        const FULL_SCALE: f64 = 2_147_483_648.0;
        let channels = self.now.of_channels.len();
        let missing = usize::try_from(self.cell - self.now.frames).unwrap_or(usize::MAX);
        let taken = missing.saturating_mul(channels).min(interleaved.len());
        let interleaved = &interleaved[..taken];
        self.held.extend_from_slice(interleaved);
        for frame in interleaved.chunks_exact(channels) {
            let mut sum = 0.0;
            for (energy, sample) in self.now.of_channels.iter_mut().zip(frame) {
                let sample = f64::from(*sample) / FULL_SCALE;
                *energy += sample * sample;
                sum += sample;
            }
            self.now.of_mean += (sum / channels as f64).powi(2);
            self.now.frames += 1;
        }
        let is_complete = self.now.frames == self.cell;
        if is_complete {
            let complete = std::mem::replace(&mut self.now, Energies::new(channels));
            if complete.mean() >= AUDIBLE * complete.frames as f64 {
                self.all.add(&complete);
                self.count += 1;
            }
        }
        (taken, is_complete)
    }

    fn decision(&self) -> Channels {
        let energies = &self.all;
        if self.count == 0 || energies.of_mean >= LOST * energies.mean() {
            return Channels::Mix;
        }
        let loudest = (0..).zip(&energies.of_channels);
        let loudest = loudest.reduce(|most, next| if next.1 > most.1 { next } else { most });
        loudest.map_or(Channels::Mix, |(channel, _)| Channels::One(channel))
    }
}

impl Mixer {
    pub fn new(channels: u32, rate: u32, used: Channels) -> Self {
        let look = (used == Channels::Mix && channels > 1).then(|| Look::new(channels as usize, rate));
        Mixer {
            channels: channels.max(1) as usize,
            decided: Decided { used, since: 0 },
            frame: 0,
            look,
        }
    }

    /// Of the samples from `frame` on of a recording whose channels have been looked at.
    pub fn from(frame: u64, channels: u32, decided: Decided) -> Self {
        Mixer {
            channels: channels.max(1) as usize,
            decided,
            frame,
            look: None,
        }
    }

    /// What is made of the channels, once it is known.
    pub fn decided(&self) -> Option<Decided> {
        self.look.is_none().then_some(self.decided)
    }

    /// Appends the one channel of the next samples, and of those that were held.
    pub fn take(&mut self, interleaved: &[i32], out: &mut Vec<f32>) {
        let mut rest = interleaved;
        while let Some(look) = &mut self.look {
            let (taken, is_complete) = look.add(rest);
            rest = &rest[taken..];
            if !is_complete {
                return;
            }
            let is_full = look.held.len() >= MOST_HELD;
            if look.count >= ENOUGH || (is_full && look.count > 0) {
                self.decide(out);
            } else if is_full {
                let silence = std::mem::take(&mut look.held);
                self.decided.since = self.frame + (silence.len() / self.channels) as u64;
                self.mix(&silence, out);
            }
        }
        self.mix(rest, out);
    }

    /// At the end of the recording: appends what was held.
    pub fn finish(&mut self, out: &mut Vec<f32>) {
        if self.look.is_some() {
            self.decide(out);
        }
    }

    fn decide(&mut self, out: &mut Vec<f32>) {
        if let Some(look) = self.look.take() {
            self.decided.used = look.decision();
            self.mix(&look.held, out);
        }
    }

    fn mix(&mut self, interleaved: &[i32], out: &mut Vec<f32>) {
        let Decided { used, since } = self.decided;
        let frames = (interleaved.len() / self.channels) as u64;
        let before = since.saturating_sub(self.frame).min(frames) as usize;
        let (silence, rest) = interleaved.split_at(before * self.channels);
        out.extend(mixed(silence, self.channels));
        match used {
            Channels::Mix => out.extend(mixed(rest, self.channels)),
            Channels::One(channel) => {
                let one = rest.iter().skip(channel as usize).step_by(self.channels);
                out.extend(one.flat_map(|sample| mixed(std::slice::from_ref(sample), 1)));
            }
        }
        self.frame += frames;
    }

    /// [`Decided::note`]
    pub fn note(&self, asked: Channels) -> Option<String> {
        self.decided.note(asked)
    }
}

/// The mean of the channels of each frame.
pub(crate) fn mixed(interleaved: &[i32], channels: usize) -> impl Iterator<Item = f32> + '_ {
    const FULL_SCALE: f64 = 2_147_483_648.0;
    let scale = 1.0 / (FULL_SCALE * channels as f64);
    let mean = move |frame: &[i32]| (frame.iter().map(|&sample| f64::from(sample)).sum::<f64>() * scale) as f32;
    interleaved.chunks_exact(channels).map(mean)
}

#[cfg(test)]
mod tests {
    use super::*;

    const RATE: u32 = 8_000;

    fn tone(at: i32) -> i32 {
        (f64::from(at) * 0.3).sin().mul_add(1e8, 0.0) as i32
    }

    /// In pieces of this many samples.
    fn mono(interleaved: &[i32], channels: u32, piece: usize) -> (Vec<f32>, Option<Channels>) {
        let mut mixer = Mixer::new(channels, RATE, Channels::Mix);
        let mut out = Vec::new();
        interleaved
            .chunks(piece * channels as usize)
            .for_each(|piece| mixer.take(piece, &mut out));
        mixer.finish(&mut out);
        (out, mixer.decided().map(|decided| decided.used))
    }

    fn frames(count: i32, frame: impl Fn(i32) -> Vec<i32>) -> Vec<i32> {
        (0..count).flat_map(frame).collect()
    }

    #[test]
    fn channels_that_cancel_each_other_out_are_not_mixed() {
        // Silence and faint noise before it decide nothing.
        let opposite = |at: i32| match at {
            0..12_000 => vec![at % 3, at % 2],
            _ => vec![tone(at), -tone(at) / 20 * 21 + at % 5],
        };
        let samples = frames(24_000, opposite);
        let expected: Vec<f32> = mixed(&frames(24_000, |at| opposite(at)[1..].to_vec()), 1).collect();
        for piece in [1, 1_000, 24_000] {
            let (found, used) = mono(&samples, 2, piece);
            assert_eq!(used, Some(Channels::One(1)));
            assert!(found == expected, "pieces of {piece}");
        }
        // A short one, too.
        assert_eq!(mono(&samples[24_000..27_000], 2, 100).1, Some(Channels::One(1)));
    }

    /// As of a recording that begins long before anybody speaks.
    #[test]
    fn silence_is_passed_over_whatever_its_length() {
        let silent = (MOST_HELD + MOST_HELD / 2) as i32 / 2;
        let samples = frames(silent + 24_000, |at| match at < silent {
            true => vec![at % 3, at % 2],
            false => vec![tone(at), -tone(at) / 20 * 21],
        });
        let (expected, used) = mono(&samples, 2, samples.len());
        assert_eq!((expected.len(), used), (samples.len() / 2, Some(Channels::One(1))));
        for piece in [577, 1_000_000] {
            assert!(mono(&samples, 2, piece).0 == expected, "pieces of {piece}");
        }
        // A part of it is the same, wherever it begins.
        let mut whole = Mixer::new(2, RATE, Channels::Mix);
        whole.take(&samples, &mut Vec::new());
        let since = whole.decided.since as usize;
        assert!((MOST_HELD / 2..silent as usize).contains(&since), "{since}");
        for from in [since - 5, since + 5] {
            let mut part = Mixer::from(from as u64, 2, whole.decided().unwrap());
            let mut found = Vec::new();
            part.take(&samples[2 * from..], &mut found);
            assert!(found == expected[from..], "from {from}");
        }
        // A second of sound that comes in the last of what is held decides with less than it would need.
        let few = frames(silent, |at| match at % (MOST_HELD as i32 / 4) < 2_000 {
            true => vec![tone(at), -tone(at)],
            false => vec![0, 0],
        });
        assert_eq!(mono(&few, 2, 100_000).1, Some(Channels::One(0)));
    }

    #[test]
    fn other_channels_are_mixed() {
        type Frame = fn(i32) -> Vec<i32>;
        let all: [(&str, Frame); 6] = [
            ("one speaker for each", |at| {
                if at % 4_000 < 2_000 {
                    vec![tone(at), 0]
                } else {
                    vec![0, tone(2 * at)]
                }
            }),
            ("the same", |at| vec![tone(at); 2]),
            ("a quieter one with another sign", |at| vec![tone(at), -tone(at) / 2]),
            ("one of eight", |at| vec![0, 0, 0, 0, 0, 0, tone(at), 0]),
            ("silence", |_| vec![0, 0]),
            // What comes later decides nothing: it is one way for the whole recording.
            ("later", |at| {
                vec![tone(at), if at < 9_000 { tone(at) } else { -tone(at) }]
            }),
        ];
        for (name, frame) in all {
            let channels = frame(0).len();
            let samples = frames(16_000, frame);
            let (found, used) = mono(&samples, channels as u32, 700);
            assert_eq!(used, Some(Channels::Mix), "{name}");
            assert!(found.iter().copied().eq(mixed(&samples, channels)), "{name}");
        }
    }
}
