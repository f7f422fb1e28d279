//! Columns of text.

use flow_base::escape::escape_line;

/// Lines of a table with a head. Columns of numbers (and `-` or `?` for none) are right-aligned, others left-aligned,
/// two spaces apart, without trailing spaces. Line breaks in a cell are escaped.
pub fn lines(rows: &[Vec<String>]) -> Vec<String> {
    let shown = |row: &Vec<String>| row.iter().map(|cell| escape_line(cell).into_owned()).collect();
    let rows: Vec<Vec<String>> = rows.iter().map(shown).collect();
    let columns = rows.iter().map(Vec::len).max().unwrap_or(0);
    let cells = |column: usize| rows.iter().filter_map(move |row| row.get(column));
    let widths: Vec<usize> = (0..columns)
        .map(|column| cells(column).map(|cell| cell.chars().count()).max().unwrap_or(0))
        .collect();
    let is_number = |cell: &String| {
        let number = cell.strip_suffix(" %").unwrap_or(cell);
        let is_digit = |c: char| c.is_ascii_digit() || matches!(c, ',' | '.');
        matches!(cell.as_str(), "-" | "?") || (!number.is_empty() && number.chars().all(is_digit))
    };
    let to_the_right: Vec<bool> = (0..columns)
        .map(|column| cells(column).skip(1).all(is_number))
        .collect();
    let line = |row: &Vec<String>| {
        let cells = row.iter().enumerate().map(|(column, cell)| {
            let blanks = " ".repeat(widths[column] - cell.chars().count());
            if to_the_right[column] {
                format!("{blanks}{cell}")
            } else {
                format!("{cell}{blanks}")
            }
        });
        cells.collect::<Vec<_>>().join("  ").trim_end().to_string()
    };
    rows.iter().map(line).collect()
}

/// A count with thousands separators: `1,234,567`.
pub fn count(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::new();
    for (position, digit) in digits.chars().enumerate() {
        if position > 0 && (digits.len() - position).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// Seconds as pages show them: `42.0 s`, `3 min 20 s`, `2 h 05 min`.
pub fn duration(seconds: f64) -> String {
    if seconds < 90.0 {
        return format!("{seconds:.1} s");
    }
    let whole = seconds.round() as u64;
    match whole / 3600 {
        0 => format!("{} min {:02} s", whole / 60, whole % 60),
        hours => format!("{hours} h {:02} min", whole / 60 % 60),
    }
}

/// `1 row`, `2 rows`.
pub fn plural(number: u64, one: &str) -> String {
    format!("{} {one}{}", count(number), if number == 1 { "" } else { "s" })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_line_up() {
        let rows = [["stage", "run", "why"], ["a", "1,000", "new"], ["längst", "-", ""]]
            .map(|row| row.map(String::from).to_vec());
        assert_eq!(
            lines(&rows),
            ["stage     run  why", "a       1,000  new", "längst      -"]
        );
        let hostile = [["name", "rows"], ["a\nb\u{1b}[2J", "1"]].map(|row| row.map(String::from).to_vec());
        assert_eq!(lines(&hostile), ["name           rows", "a\\nb\\u{1b}[2J     1"]);
        assert_eq!(
            [count(0), count(999), count(1000), count(1234567)],
            ["0", "999", "1,000", "1,234,567"]
        );
        assert_eq!([plural(1, "row"), plural(1200, "row")], ["1 row", "1,200 rows"]);
    }
}
