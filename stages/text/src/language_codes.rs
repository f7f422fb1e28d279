//! Codes of three letters (ISO 639-2, 639-3) of languages that have one of two letters (ISO 639-1), too.

/// Codes of three letters with those of two, sorted. Some languages have two of three letters, such as `deu` and `ger`.
const CODES: &str = "\
    aar:aa abk:ab afr:af aka:ak alb:sq amh:am ara:ar arg:an arm:hy asm:as ava:av ave:ae aym:ay aze:az bak:ba bam:bm \
    baq:eu bel:be ben:bn bih:bh bis:bi bod:bo bos:bs bre:br bul:bg bur:my cat:ca ces:cs cha:ch che:ce chi:zh chu:cu \
    chv:cv cor:kw cos:co cre:cr cym:cy cze:cs dan:da deu:de div:dv dut:nl dzo:dz ell:el eng:en epo:eo est:et eus:eu \
    ewe:ee fao:fo fas:fa fij:fj fin:fi fra:fr fre:fr fry:fy ful:ff geo:ka ger:de gla:gd gle:ga glg:gl glv:gv gre:el \
    grn:gn guj:gu hat:ht hau:ha hbs:sh heb:he her:hz hin:hi hmo:ho hrv:hr hun:hu hye:hy ibo:ig ice:is ido:io iii:ii \
    iku:iu ile:ie ina:ia ind:id ipk:ik isl:is ita:it jav:jv jpn:ja kal:kl kan:kn kas:ks kat:ka kau:kr kaz:kk khm:km \
    kik:ki kin:rw kir:ky kom:kv kon:kg kor:ko kua:kj kur:ku lao:lo lat:la lav:lv lim:li lin:ln lit:lt ltz:lb lub:lu \
    lug:lg mac:mk mah:mh mal:ml mao:mi mar:mr may:ms mkd:mk mlg:mg mlt:mt mon:mn mri:mi msa:ms mya:my nau:na nav:nv \
    nbl:nr nde:nd ndo:ng nep:ne nld:nl nno:nn nob:nb nor:no nya:ny oci:oc oji:oj ori:or orm:om oss:os pan:pa per:fa \
    pli:pi pol:pl por:pt pus:ps que:qu roh:rm ron:ro rum:ro run:rn rus:ru sag:sg san:sa sin:si slk:sk slo:sk slv:sl \
    sme:se smo:sm sna:sn snd:sd som:so sot:st spa:es sqi:sq srd:sc srp:sr ssw:ss sun:su swa:sw swe:sv tah:ty tam:ta \
    tat:tt tel:te tgk:tg tgl:tl tha:th tib:bo tir:ti ton:to tsn:tn tso:ts tuk:tk tur:tr twi:tw uig:ug ukr:uk urd:ur \
    uzb:uz ven:ve vie:vi vol:vo wel:cy wln:wa wol:wo xho:xh yid:yi yor:yo zha:za zho:zh zul:zu";

/// Each code of three letters with that of two.
fn codes() -> impl Iterator<Item = (&'static str, &'static str)> {
    CODES.split_whitespace().filter_map(|entry| entry.split_once(':'))
}

/// The code of two letters of the language that has this one of three, in any case.
///
/// ```
/// # use flow_text::language_codes::two_letters;
/// assert_eq!(two_letters("ENG"), Some("en"));
/// assert_eq!(two_letters("mai"), None);
/// assert_eq!(two_letters("en"), None);
/// ```
pub fn two_letters(code: &str) -> Option<&'static str> {
    if code.len() != 3 {
        return None;
    }
    let found = codes().find(|(three, _)| three.eq_ignore_ascii_case(code));
    found.map(|(_, two)| two)
}

/// The codes of three letters of the language that has this one of two, in any case.
pub fn three_letters(code: &str) -> impl Iterator<Item = &'static str> {
    let found = codes().filter(move |(_, two)| two.eq_ignore_ascii_case(code));
    found.map(|(three, _)| three)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_is_sorted_and_has_two_ways() {
        assert_eq!(codes().count(), CODES.split_whitespace().count());
        assert!(codes().is_sorted_by(|a, b| a.0 < b.0));
        for (three, two) in codes() {
            assert_eq!((three.len(), two.len()), (3, 2), "{three}");
            assert_eq!(two_letters(three), Some(two));
            assert!(three_letters(two).any(|other| other == three));
        }
        assert_eq!(three_letters("DE").collect::<Vec<_>>(), ["deu", "ger"]);
        assert_eq!(three_letters("xx").count(), 0);
    }
}
