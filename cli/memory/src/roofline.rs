//! `flow memory --roofline`: the least time of a training step on a card, part by part.

use std::io::Write;

use flow_model::ModelConfig;
use flow_training::memory::BatchShape;
use flow_training::resolved_settings::ResolvedSettings;
use flow_training::roofline::{Arithmetic, Bound, CARDS, Card, Part, Work, parameter_counts, parts};
use flow_training::settings::Precision;

use flow_inspect::table;

/// A card by its name.
pub fn card(text: &str) -> Result<&'static Card, String> {
    Card::named(text.trim()).ok_or_else(|| {
        let names: Vec<&str> = CARDS.iter().map(|card| card.name).collect();
        format!(
            "`{text}` is not a card whose rates are known; write {}",
            names.join(", ")
        )
    })
}

/// `9x10x120`: clips, seconds and tokens.
pub fn micro_batch(text: &str) -> Result<BatchShape, String> {
    let wrong =
        || "write CLIPSxSECONDSxTOKENS, such as 9x10x120; at most 10000 clips of a day and 100000 tokens".to_string();
    let [clips, seconds, tokens] = text.trim().split('x').collect::<Vec<_>>()[..] else {
        return Err(wrong());
    };
    let shape = BatchShape {
        utterances: clips.parse().map_err(|_| wrong())?,
        seconds: seconds.parse().map_err(|_| wrong())?,
        tokens: tokens.parse().map_err(|_| wrong())?,
    };
    let fits = (1..=10_000).contains(&shape.utterances)
        && (0.1..=86_400.0).contains(&shape.seconds)
        && shape.tokens <= 100_000;
    if fits { Ok(shape) } else { Err(wrong()) }
}

/// The table.
pub fn write(
    out: &mut dyn Write,
    name: &str,
    config: &ModelConfig,
    settings: &ResolvedSettings,
    shape: BatchShape,
    card: &Card,
) -> std::io::Result<()> {
    let matrices_in_bf16 = settings.precision == Precision::Bf16;
    let parameters = parameter_counts(config).0;
    writeln!(
        out,
        "{name}: {:.0} million parameters, matrices in {}, {} of {} s with {} tokens each, on {}",
        parameters / 1e6,
        if matrices_in_bf16 { "bf16" } else { "f32" },
        table::plural(shape.utterances as u64, "clip"),
        shape.seconds,
        shape.tokens,
        card.full_name
    )?;
    let rate = |flops: f64| format!("{:.1}", flops / 1e12);
    writeln!(
        out,
        "dense TFLOP/s: {} in bf16, {} in TF32, {} in f32; {:.2} TB/s of memory ({})",
        rate(card.bf16),
        rate(card.tf32),
        rate(card.f32),
        card.memory / 1e12,
        card.source
    )?;
    writeln!(out)?;
    let now = Arithmetic {
        matrices_in_bf16,
        tf32: settings.tf32_on_gpus(),
    };
    let other = Arithmetic { tf32: !now.tf32, ..now };
    let with_other = if other.tf32 { "with TF32" } else { "without TF32" };
    let parts = parts(config, settings, shape, true);
    let least = |arithmetic: Arithmetic| {
        parts
            .iter()
            .map(|part| card.least_time(&part.work, arithmetic).seconds)
            .sum::<f64>()
    };
    for line in table::lines(&rows(&parts, card, now, (other, with_other))) {
        writeln!(out, "{line}")?;
    }
    writeln!(out)?;
    let model: f64 = parts.iter().map(|part| part.work.model.all()).sum();
    let used = |arithmetic: Arithmetic| {
        let peak = match arithmetic {
            Arithmetic {
                matrices_in_bf16: true, ..
            } => card.bf16,
            Arithmetic { tf32: true, .. } => card.tf32,
            _ => card.f32,
        };
        let share = 100.0 * model / (least(arithmetic) * peak);
        format!("{share:.1} % of {} TFLOP/s", rate(peak))
    };
    writeln!(out, "model FLOP utilisation at the least time: {}", used(now))?;
    writeln!(out, "{with_other} for products in f32: {}", used(other))
}

fn rows(parts: &[Part], card: &Card, now: Arithmetic, (other, with_other): (Arithmetic, &str)) -> Vec<Vec<String>> {
    let head = ["part", "GFLOP", "again", "GB", "least ms", "bound by"];
    let mut rows = vec![head.map(String::from).to_vec()];
    rows[0].push(format!("ms {with_other}"));
    let giga = |number: f64| format!("{:.1}", number / 1e9);
    let milliseconds = |seconds: f64| format!("{:.2}", seconds * 1e3);
    let row = |name: &str, work: &Work, seconds: [f64; 2], bound: &str| {
        let numbers = [work.model.all(), work.again.all(), work.bytes + work.exchanged].map(giga);
        let [flops, again, bytes] = numbers;
        let [now, other] = seconds.map(milliseconds);
        vec![name.to_string(), flops, again, bytes, now, bound.to_string(), other]
    };
    let (mut all, mut sums) = (Work::default(), [0.0; 2]);
    for Part { name, work } in parts {
        let [first, second] = [now, other].map(|arithmetic| card.least_time(work, arithmetic));
        let bound = match first.bound {
            Bound::Arithmetic => "arithmetic",
            Bound::Memory => "memory",
            Bound::Link => "link",
        };
        all += *work;
        sums[0] += first.seconds;
        sums[1] += second.seconds;
        rows.push(row(name, work, [first.seconds, second.seconds], bound));
    }
    rows.push(row("all", &all, sums, ""));
    rows
}

#[cfg(test)]
mod tests {
    use flow_training::settings::TrainSettings;

    use super::*;

    const V3: &str = "
preprocessor: {sample_rate: 16000, window_size: 0.025, window_stride: 0.01, features: 128, n_fft: 512, pad_to: 0}
encoder:
  {feat_in: 128, n_layers: 24, d_model: 1024, n_heads: 8, use_bias: false, xscaling: false, conv_kernel_size: 9,
   subsampling: dw_striding, subsampling_factor: 8, subsampling_conv_channels: 256, dropout: 0.1,
   dropout_pre_encoder: 0.1, dropout_emb: 0.0, dropout_att: 0.1}
decoder: {vocab_size: 8192, prednet: {pred_hidden: 640, pred_rnn_layers: 2, dropout: 0.2}}
joint: {num_extra_outputs: 5, jointnet: {joint_hidden: 640, dropout: 0.2}}
loss: {loss_name: tdt, tdt_kwargs: {durations: [0, 1, 2, 3, 4], sigma: 0.02}}
";

    #[test]
    fn shapes_and_cards_are_read() {
        let shape = BatchShape {
            utterances: 9,
            seconds: 10.5,
            tokens: 0,
        };
        assert_eq!(micro_batch("9x10.5x0"), Ok(shape));
        for wrong in [
            "",
            "9",
            "9x10",
            "9x10x1x1",
            "0x10x1",
            "9xNaNx1",
            "9xinfx1",
            "-1x1x1",
            "1x1x-1",
            "20000x1x1",
            "1x0x1",
            "1x1x1e3",
        ] {
            assert!(micro_batch(wrong).is_err(), "{wrong}");
        }
        assert_eq!(card("H200").map(|card| card.name), Ok("h200"));
        assert!(card("a100").is_err_and(|error| error.contains("h100, h200, l4, 4090")));
    }

    #[test]
    fn the_released_model_on_an_h100() {
        let config = ModelConfig::from_nemo_yaml(V3).expect("the configuration above is valid");
        let settings = ResolvedSettings::from(TrainSettings {
            precision: Precision::Bf16,
            ..TrainSettings::default()
        });
        let shape = micro_batch("9x10x120").expect("a shape");
        let mut out = Vec::new();
        write(
            &mut out,
            "parakeet",
            &config,
            &settings,
            shape,
            card("h100").expect("a card"),
        )
        .expect("a table");
        insta::assert_snapshot!(String::from_utf8_lossy(&out));
    }
}
