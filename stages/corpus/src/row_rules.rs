//! Rules for rows of every format: the form of languages, and limits of the duration.

use flow_text::language_tag::{in_usual_case, is_language, language_and_region, usual_language};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::manifest_row::{Refusal, refuse_by_rule};

/// Names of folders of three letters that are no languages in the folders of a corpus, though some are ISO 639-3 codes.
const NO_LANGUAGES: [&str; 14] = [
    "aac", "all", "dev", "lab", "oga", "ogg", "raw", "rec", "set", "spk", "txt", "utt", "val", "wav",
];

/// The codes of ISO 639-1: no other folder of two letters names a language.
const TWO_LETTERS: &str = "aa ab ae af ak am an ar as av ay az ba be bg bh bi bm bn bo br bs ca ce ch co cr cs cu cv cy da de \
    dv dz ee el en eo es et eu fa ff fi fj fo fr fy ga gd gl gn gu gv ha he hi ho hr ht hu hy hz ia id ie ig ii ik io is it iu \
    ja jv ka kg ki kj kk kl km kn ko kr ks ku kv kw ky la lb lg li ln lo lt lu lv mg mh mi mk ml mn mr ms mt my na nb nd ne ng \
    nl nn no nr nv ny oc oj om or os pa pi pl ps pt qu rm rn ro ru rw sa sc sd se sg sh si sk sl sm sn so sq sr ss st su sv sw \
    ta te tg th ti tk tl tn to tr ts tt tw ty ug uk ur uz ve vi vo wa wo xh yi yo za zh zu";

/// Codes of three letters that corpora of speech have, less those that are names or words, too.
const THREE_LETTERS: &str = "aar abk afr aka alb amh apc ara arg ary arz asm ast ava ave awa aym aze azj bak bam baq bas bel bem ben bgc bho bik \
    bis bod bos bre brx bul bur cat ceb ces cha che chu chv ckb cmn cnh cor cos cre cym cze dag deu div doi dsb dut dyu \
    dzo efi ell eng epo est eus ewe fao fas fij fil fin fra fre fry ful gaa gbm geo ger gla gle glg glv gom gre grn guj \
    guz hau haw hbs heb hil hin hmn hmo hne hrv hsb hun hye iba ibb ibo ice iii iku ilo ina ind ipk isl ita jpn kab kal \
    kam kan kas kat kau kaz kea kfy khm kik kir kln kmb kmr kok kom kon kor kri kua kur lao lat lav lij lit ltg ltz lub \
    lug luo luy lzh mah mai mao mar mdf mhr mkd mlg mlt mni mon mri mrj msa mya myv nan nau nav nbl nde ndo nep nld nno \
    nob nor npi nso nya nyn oci oji ori orm ory oss pes pli pol por prs pus que quy raj roh ron rus sah san sat skr slk \
    slo slv sme smo sna snd som sot spa sqi srd srp ssw swa swe swh syr tah tam tel tgk tgl tha tib tig tir tiv tpi tsn \
    tso tuk tum tur twi uig ukr umb urd uzb ven vie vol vot wbr wel wln wol xho yao yid yor yue zgh zha zho zlm zul zza";

/// Whether the region of a language tag is kept.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Regions {
    /// `en-US`, `en_US` and `pt-BR` become `en` and `pt`.
    #[default]
    Drop,
    /// Tags keep theirs: `EN-us` becomes `en-US`.
    Keep,
}

/// The rules that every row is checked by.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct RowRules {
    pub regions: Regions,
    /// In seconds; a row of exactly this length stays.
    pub min_duration: Option<f64>,
    /// In seconds; a row of exactly this length stays.
    pub max_duration: Option<f64>,
}

impl RowRules {
    /// The language as the column `lang` has it.
    pub fn language(&self, tag: String) -> String {
        match self.regions {
            Regions::Drop => usual_language(&tag),
            Regions::Keep if is_language(&tag) => in_usual_case(&tag),
            Regions::Keep => tag,
        }
    }

    /// # Errors
    /// Where the row is too short or too long.
    pub fn duration(&self, seconds: f64) -> Result<(), Refusal> {
        if let Some(least) = self.min_duration.filter(|&least| seconds < least) {
            let why = format!("{seconds} s; `min_duration` is {least} s");
            return Err(refuse_by_rule("duration_too_short", why));
        }
        if let Some(most) = self.max_duration.filter(|&most| seconds > most) {
            let why = format!("{seconds} s; `max_duration` is {most} s");
            return Err(refuse_by_rule("duration_too_long", why));
        }
        Ok(())
    }
}

/// How much the name of a folder looks like a language.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Likeness {
    /// `dev`, `wav`, `speaker1`.
    None,
    /// Three letters that may be anything (`cut`, `man`, `bob`): a language beside folders that are named like ones.
    Beside,
    /// A code of ISO 639-1, or one of three letters that corpora of speech have; perhaps with a region (`hi`, `en-IN`).
    Code,
}

/// How much a folder is named like a language.
pub fn names_language(folder: &str) -> Likeness {
    // A number after letters is more often that of a speaker (`spk_001`) than a region's.
    let tag = language_and_region(folder).filter(|(_, region)| region.len() == 2);
    let language = tag.map_or(folder, |(language, _)| language);
    let language = language.to_ascii_lowercase();
    let is_among = |codes: &str| codes.split_ascii_whitespace().any(|code| code == language);
    match language.len() {
        2 if is_among(TWO_LETTERS) => Likeness::Code,
        3 if is_among(THREE_LETTERS) => Likeness::Code,
        3 if language.bytes().all(|byte| byte.is_ascii_alphabetic()) && !NO_LANGUAGES.contains(&language.as_str()) => {
            Likeness::Beside
        }
        _ => Likeness::None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use flow_kind::RejectClass;

    #[test]
    fn folders_of_speakers_and_sets_name_no_language() {
        for (folder, likeness) in [
            ("rec", Likeness::None),
            ("cut", Likeness::Beside),
            ("man", Likeness::Beside),
            ("hi", Likeness::Code),
            ("en-IN", Likeness::Code),
            ("nan_tw", Likeness::Code),
            ("spk_001", Likeness::None),
            ("utt-042", Likeness::None),
            ("wav", Likeness::None),
            ("wav_001", Likeness::None),
            ("dev-us", Likeness::None),
            ("dr", Likeness::None),
            ("spk", Likeness::None),
            ("a", Likeness::None),
        ] {
            assert_eq!(names_language(folder), likeness, "{folder}");
        }
    }

    #[test]
    fn regions_go_and_other_parts_of_tags_stay() {
        let drop = RowRules::default();
        let keep = RowRules {
            regions: Regions::Keep,
            ..drop
        };
        for (tag, language) in [
            ("en-US", "en"),
            ("en_US", "en"),
            ("pt-BR", "pt"),
            ("EN-us", "en"),
            ("es-419", "es"),
            ("nan-tw", "nan"),
            ("en", "en"),
            ("hin", "hin"),
            ("Klingon", "Klingon"),
            ("zh-Hant", "zh-Hant"),
            ("zh-Hant-TW", "zh-Hant-TW"),
            ("rm-sursilv", "rm-sursilv"),
            ("e-US", "e-US"),
            ("en-", "en-"),
            ("en-é", "en-é"),
            ("", ""),
        ] {
            assert_eq!(drop.language(tag.into()), language, "{tag}");
        }
        for (tag, language) in [
            ("EN", "en"),
            ("en", "en"),
            ("EN-US", "en-US"),
            ("EN_us", "en_US"),
            ("en-US", "en-US"),
            ("es-419", "es-419"),
            ("ZH-hANT-tw", "zh-Hant-TW"),
            ("SL-ROZAJ-1994", "sl-rozaj-1994"),
            ("en-", "en-"),
            ("en-É", "en-É"),
            ("Klingon", "Klingon"),
            ("", ""),
        ] {
            assert_eq!(keep.language(tag.into()), language, "{tag}");
        }
        for (tag, language) in [("EN", "en"), ("HIN", "hin"), ("ZH-hant", "zh-Hant")] {
            assert_eq!(drop.language(tag.into()), language, "{tag}");
        }
    }

    #[test]
    fn rows_at_the_limit_stay() {
        let rules = RowRules {
            min_duration: Some(1.0),
            max_duration: Some(20.0),
            ..RowRules::default()
        };
        let reason = |seconds: f64| {
            let refusal = rules.duration(seconds).err()?;
            assert_eq!(refusal.class, RejectClass::Rule);
            Some(refusal.reason)
        };
        assert_eq!((reason(1.0), reason(20.0)), (None, None));
        assert_eq!(reason(1.0_f64.next_down()), Some("duration_too_short"));
        assert_eq!(reason(20.0_f64.next_up()), Some("duration_too_long"));
        assert_eq!(RowRules::default().duration(1e9), Ok(()));
    }

    #[test]
    fn folders_of_splits_and_formats_are_no_languages() {
        for name in ["hi", "hin", "en-IN", "pt_BR", "Hi"] {
            assert_eq!(names_language(name), Likeness::Code, "{name}");
        }
        for name in [
            "dev",
            "dev-clean",
            "wav",
            "WAV",
            "wavs",
            "train",
            "a",
            "h1",
            "en-clean",
            "",
        ] {
            assert_eq!(names_language(name), Likeness::None, "{name}");
        }
    }
}
