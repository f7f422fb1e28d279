//! English names of languages, for pages that people read.

use maud::{Markup, html};

/// The name of a language, and its code.
pub fn language(code: &str) -> Markup {
    html! { @match name(code) {
        Some(name) => { (name) " " span.quiet { (code) } }
        None => { (code) }
    } }
}

/// The name of a language, or else its code. One of a region keeps it: `Portuguese (pt-BR)`.
pub fn language_name(code: &str) -> String {
    match name(code) {
        Some(name) if code.contains(['-', '_']) => format!("{name} ({code})"),
        Some(name) => name.to_owned(),
        None => code.to_owned(),
    }
}

fn name(code: &str) -> Option<&'static str> {
    let primary = code.split(['-', '_']).next().unwrap_or_default().to_ascii_lowercase();
    let mut names = NAMES.split("; ").filter_map(|entry| entry.split_once(' '));
    names.find_map(|(known, name)| (known == primary).then_some(name))
}

/// The codes of ISO 639-1, and some of ISO 639-3 that corpora of speech have, with their names.
const NAMES: &str = "\
    aa Afar; ab Abkhazian; ae Avestan; af Afrikaans; ak Akan; am Amharic; an Aragonese; ar Arabic; as Assamese; \
    av Avaric; ay Aymara; az Azerbaijani; ba Bashkir; be Belarusian; bg Bulgarian; bho Bhojpuri; bi Bislama; \
    bm Bambara; bn Bengali; bo Tibetan; br Breton; brx Bodo; bs Bosnian; ca Catalan; ce Chechen; ceb Cebuano; \
    ch Chamorro; cmn Mandarin Chinese; co Corsican; cr Cree; cs Czech; cu Church Slavic; cv Chuvash; cy Welsh; \
    da Danish; de German; doi Dogri; dv Divehi; dz Dzongkha; ee Ewe; el Greek; en English; eo Esperanto; \
    es Spanish; et Estonian; eu Basque; fa Persian; ff Fulah; fi Finnish; fil Filipino; fj Fijian; fo Faroese; \
    fr French; fy Western Frisian; ga Irish; gd Scottish Gaelic; gl Galician; gn Guarani; gom Goan Konkani; \
    gu Gujarati; gv Manx; ha Hausa; haw Hawaiian; he Hebrew; hi Hindi; hne Chhattisgarhi; ho Hiri Motu; \
    hr Croatian; ht Haitian Creole; hu Hungarian; hy Armenian; hz Herero; ia Interlingua; id Indonesian; \
    ie Interlingue; ig Igbo; ii Sichuan Yi; ik Inupiaq; io Ido; is Icelandic; it Italian; iu Inuktitut; \
    ja Japanese; jv Javanese; ka Georgian; kg Kongo; ki Kikuyu; kj Kuanyama; kk Kazakh; kl Kalaallisut; \
    km Khmer; kn Kannada; ko Korean; kok Konkani; kr Kanuri; ks Kashmiri; ku Kurdish; kv Komi; kw Cornish; \
    ky Kyrgyz; la Latin; lb Luxembourgish; lg Ganda; li Limburgish; ln Lingala; lo Lao; lt Lithuanian; \
    lu Luba-Katanga; lv Latvian; mag Magahi; mai Maithili; mg Malagasy; mh Marshallese; mi Maori; \
    mk Macedonian; ml Malayalam; mn Mongolian; mni Manipuri; mr Marathi; ms Malay; mt Maltese; my Burmese; \
    na Nauru; nb Norwegian Bokmål; nd North Ndebele; ne Nepali; ng Ndonga; nl Dutch; nn Norwegian Nynorsk; \
    no Norwegian; nr South Ndebele; nv Navajo; ny Chichewa; oc Occitan; oj Ojibwa; om Oromo; or Odia; \
    os Ossetian; pa Punjabi; pi Pali; pl Polish; ps Pashto; pt Portuguese; qu Quechua; raj Rajasthani; \
    rm Romansh; rn Rundi; ro Romanian; ru Russian; rw Kinyarwanda; sa Sanskrit; sat Santali; sc Sardinian; \
    sd Sindhi; se Northern Sami; sg Sango; si Sinhala; sk Slovak; sl Slovenian; sm Samoan; sn Shona; so Somali; \
    sq Albanian; sr Serbian; ss Swati; st Southern Sotho; su Sundanese; sv Swedish; sw Swahili; ta Tamil; \
    tcy Tulu; te Telugu; tg Tajik; th Thai; ti Tigrinya; tk Turkmen; tl Tagalog; tn Tswana; to Tongan; \
    tr Turkish; ts Tsonga; tt Tatar; tw Twi; ty Tahitian; ug Uyghur; uk Ukrainian; und undetermined; ur Urdu; \
    uz Uzbek; ve Venda; vi Vietnamese; vo Volapük; wa Walloon; wo Wolof; xh Xhosa; yi Yiddish; yo Yoruba; \
    yue Cantonese; za Zhuang; zh Chinese; zu Zulu";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn languages_are_called_by_their_names() {
        assert_eq!(language_name("zu"), "Zulu");
        assert_eq!(language_name("hi"), "Hindi");
        assert_eq!(language_name("pt-BR"), "Portuguese (pt-BR)");
        assert_eq!(language_name("EN"), "English");
        for unknown in ["", "xx", "all", "<b>"] {
            assert_eq!(language_name(unknown), unknown);
        }
        assert_eq!(language("<b>").into_string(), "&lt;b&gt;");
        assert_eq!(
            language("mai").into_string(),
            "Maithili <span class=\"quiet\">mai</span>"
        );
    }
}
