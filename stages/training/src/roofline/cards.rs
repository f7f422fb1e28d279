//! What cards are said to do in a second.

/// A card's published rates: of dense matrices, with sums in 32 bits.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Card {
    /// As it is named on the command line.
    pub name: &'static str,
    pub full_name: &'static str,
    /// Floating-point operations per second of products in bf16, in TF32 and in f32.
    pub bf16: f64,
    pub tf32: f64,
    pub f32: f64,
    /// Bytes per second of its memory.
    pub memory: f64,
    /// Bytes per second to other cards, in one direction.
    pub link: f64,
    /// Where the numbers are from.
    pub source: &'static str,
}

/// The cards that are known. Where a source gives rates with sparsity, half of each is given here.
pub const CARDS: [Card; 4] = [
    Card {
        name: "h100",
        full_name: "NVIDIA H100 SXM",
        bf16: 989.5e12,
        tf32: 494.5e12,
        f32: 67e12,
        memory: 3.35e12,
        link: 450e9,
        source: "NVIDIA H100 Tensor Core GPU datasheet",
    },
    Card {
        name: "h200",
        full_name: "NVIDIA H200 SXM",
        bf16: 989.5e12,
        tf32: 494.5e12,
        f32: 67e12,
        memory: 4.8e12,
        link: 450e9,
        source: "NVIDIA H200 Tensor Core GPU datasheet",
    },
    Card {
        name: "l4",
        full_name: "NVIDIA L4",
        bf16: 121e12,
        tf32: 60e12,
        f32: 30.3e12,
        memory: 300e9,
        link: 32e9,
        source: "NVIDIA L4 Tensor Core GPU datasheet; the link is PCIe 4.0 x16",
    },
    Card {
        name: "4090",
        full_name: "NVIDIA GeForce RTX 4090",
        bf16: 165.2e12,
        tf32: 82.6e12,
        f32: 82.6e12,
        memory: 1.008e12,
        link: 32e9,
        source: "NVIDIA Ada GPU Architecture whitepaper; the link is PCIe 4.0 x16",
    },
];

impl Card {
    /// The card that the driver names so; none where its rates are not known.
    pub fn of_device(name: &str) -> Option<&'static Card> {
        // Boards of the same name with other connectors have other rates.
        let card = match name {
            "NVIDIA H100 80GB HBM3" => "h100",
            "NVIDIA H200" => "h200",
            "NVIDIA L4" => "l4",
            "NVIDIA GeForce RTX 4090" => "4090",
            _ => return None,
        };
        Card::named(card)
    }

    /// The card of a name.
    pub fn named(name: &str) -> Option<&'static Card> {
        CARDS.iter().find(|card| card.name.eq_ignore_ascii_case(name))
    }
}
