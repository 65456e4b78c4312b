//! Patterns of names, as shells and `find` have them: `*`, `?`, `[a-z]`, `[!a-z]`, and `\` before a
//! character that stands for itself.
//!
//! Names are bytes, so a character is a whole one where the name is UTF-8 there, and one byte
//! elsewhere. The work is bounded by the product of both lengths.

/// Whether a text has anything that a pattern acts upon.
#[must_use]
pub(crate) fn is_pattern(text: &[u8]) -> bool {
    text.iter().any(|byte| matches!(byte, b'*' | b'?' | b'['))
}

/// The text without the backslashes that protect characters.
#[must_use]
pub fn unescaped(pattern: &[u8]) -> Vec<u8> {
    let mut text = Vec::with_capacity(pattern.len());
    let mut bytes = pattern.iter();
    while let Some(&byte) = bytes.next() {
        match (byte, bytes.as_slice().first()) {
            (b'\\', Some(&next)) => {
                text.push(next);
                bytes.next();
            }
            _ => text.push(byte),
        }
    }
    text
}

/// A pattern in the form in which it is matched.
pub struct Pattern {
    parts: Vec<PatternPart>,
    ignores_case: bool,
}

enum PatternPart {
    /// Any number of characters.
    Many,
    /// One character, whichever.
    One,
    /// This character.
    Just(Char),
    /// One of these, or none of them.
    Class { is_negated: bool, ranges: Vec<(Char, Char)> },
}

/// A character, or a byte that is none, above all characters.
type Char = u32;

/// The characters of `text`.
fn chars(text: &[u8]) -> Vec<Char> {
    const BYTES: Char = 0x20_0000;
    let mut chars = Vec::with_capacity(text.len());
    for chunk in text.utf8_chunks() {
        chars.extend(chunk.valid().chars().map(u32::from));
        chars.extend(chunk.invalid().iter().map(|&byte| BYTES + u32::from(byte)));
    }
    chars
}

fn lower(char: Char) -> Char {
    let lower = char::from_u32(char).map(char::to_lowercase);
    // What becomes several characters stays.
    lower
        .filter(|lower| lower.len() == 1)
        .and_then(|mut lower| lower.next())
        .map_or(char, u32::from)
}

impl Pattern {
    /// The pattern that `text` is.
    #[must_use]
    pub fn new(text: &[u8]) -> Self {
        Self::parse(text, false)
    }

    /// The same for names in upper and lower case.
    #[must_use]
    pub fn ignoring_case(text: &[u8]) -> Self {
        Self::parse(text, true)
    }

    fn parse(text: &[u8], ignores_case: bool) -> Self {
        let fold = |char| if ignores_case { lower(char) } else { char };
        let text = chars(text);
        let (mut parts, mut at) = (Vec::new(), 0);
        while let Some(&char) = text.get(at) {
            at += 1;
            parts.push(match char::from_u32(char) {
                Some('*') => PatternPart::Many,
                Some('?') => PatternPart::One,
                Some('\\') if at < text.len() => {
                    at += 1;
                    PatternPart::Just(fold(text[at - 1]))
                }
                Some('[') => match class(&text[at..]) {
                    Some((is_negated, ranges, len)) => {
                        at += len;
                        let ranges = ranges.into_iter().map(|(a, b)| (fold(a), fold(b))).collect();
                        PatternPart::Class { is_negated, ranges }
                    }
                    None => PatternPart::Just(char),
                },
                _ => PatternPart::Just(fold(char)),
            });
        }
        Self { parts, ignores_case }
    }

    /// Whether the pattern is the whole of `name`.
    #[must_use]
    pub fn matches(&self, name: &[u8]) -> bool {
        let mut name = chars(name);
        if self.ignores_case {
            for char in &mut name {
                *char = lower(*char);
            }
        }
        let (mut part, mut at) = (0, 0);
        // Where to go on when what follows the last `*` does not match: it takes one more.
        let mut again = None;
        while at < name.len() {
            let fits = match self.parts.get(part) {
                Some(PatternPart::Many) => {
                    part += 1;
                    again = Some((part, at));
                    continue;
                }
                Some(PatternPart::One) => true,
                Some(PatternPart::Just(char)) => *char == name[at],
                Some(PatternPart::Class { is_negated, ranges }) => {
                    ranges.iter().any(|&(a, b)| (a..=b).contains(&name[at])) != *is_negated
                }
                None => false,
            };
            if fits {
                (part, at) = (part + 1, at + 1);
            } else if let Some((after, start)) = again {
                (part, at) = (after, start + 1);
                again = Some((after, start + 1));
            } else {
                return false;
            }
        }
        self.parts[part..].iter().all(|part| matches!(part, PatternPart::Many))
    }
}

/// The class that begins behind a `[`, and its length with the `]`; `None` where that is missing.
#[expect(clippy::type_complexity, reason = "it is taken apart where it is called")]
fn class(text: &[Char]) -> Option<(bool, Vec<(Char, Char)>, usize)> {
    let of = |at: usize| text.get(at).copied();
    let is = |at: usize, char: char| of(at) == Some(u32::from(char));
    let is_negated = is(0, '!') || is(0, '^');
    let start = usize::from(is_negated);
    let (mut at, mut ranges) = (start, Vec::new());
    // A `]` in front is one of the characters.
    while at == start || !is(at, ']') {
        let char =
            |at: usize| if is(at, '\\') { Some((of(at + 1)?, 2)) } else { Some((of(at)?, 1)) };
        if is(at, '[') && is(at + 1, ':') {
            let name_at = at + 2;
            let len = (name_at..text.len()).find(|&at| is(at, ':') && is(at + 1, ']'))? - name_at;
            ranges.extend(named(&text[name_at..name_at + len])?);
            at = name_at + len + 2;
            continue;
        }
        let (first, len) = char(at)?;
        at += len;
        if is(at, '-') && at + 1 < text.len() && !is(at + 1, ']') {
            let (last, len) = char(at + 1)?;
            at += 1 + len;
            ranges.push((first, last));
        } else {
            ranges.push((first, first));
        }
    }
    Some((is_negated, ranges, at + 1))
}

/// The characters of a class such as `[:digit:]`.
fn named(name: &[Char]) -> Option<Vec<(Char, Char)>> {
    let name: String = name.iter().map(|&char| char::from_u32(char)).collect::<Option<_>>()?;
    let ranges: &[(char, char)] = match name.as_str() {
        "digit" => &[('0', '9')],
        "alpha" => &[('a', 'z'), ('A', 'Z')],
        "alnum" => &[('a', 'z'), ('A', 'Z'), ('0', '9')],
        "lower" => &[('a', 'z')],
        "upper" => &[('A', 'Z')],
        "space" => &[('\t', '\r'), (' ', ' ')],
        "blank" => &[('\t', '\t'), (' ', ' ')],
        "xdigit" => &[('0', '9'), ('a', 'f'), ('A', 'F')],
        "punct" => &[('!', '/'), (':', '@'), ('[', '`'), ('{', '~')],
        _ => return None,
    };
    Some(ranges.iter().map(|&(a, b)| (a.into(), b.into())).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns() {
        for (pattern, yes, no) in [
            ("*", &["", "a", "a.b", "x/y"][..], &[][..]),
            ("a*b*c", &["abc", "aXbYbZc", "abbc"], &["ab", "abcd", "xabc"]),
            ("?", &["a", "ü"], &["", "ab"]),
            ("*.c", &["x.c", ".c"], &["x.h", "x.c.o"]),
            ("[a-c]x", &["ax", "cx"], &["dx", "x", "-x"]),
            ("[!a-c]x", &["dx", "üx"], &["ax"]),
            ("[^ab]", &["c"], &["a"]),
            ("[]a]", &["]", "a"], &["b"]),
            ("[a-]", &["a", "-"], &["b"]),
            ("[[:digit:]x]", &["5", "x"], &["y", ":"]),
            ("[a", &["[a"], &["a"]),
            ("[\\]]", &["]"], &["\\"]),
            ("a\\*", &["a*"], &["ab", "a\\"]),
            ("\\", &["\\"], &[""]),
            ("", &[""], &["a"]),
        ] {
            let matcher = Pattern::new(pattern.as_bytes());
            for (names, expected) in [(yes, true), (no, false)] {
                for name in names {
                    assert_eq!(matcher.matches(name.as_bytes()), expected, "{pattern} {name}");
                }
            }
        }
        assert!(Pattern::new(b"a?c").matches(b"a\xffc"));
        assert!(Pattern::ignoring_case(b"*.JP[EF]G").matches("Ä.jpeg".as_bytes()));
        assert!(!Pattern::new(b"*.JPG").matches(b"x.jpg"));
    }

    #[test]
    fn many_stars_end() {
        let pattern = Pattern::new(&b"*a".repeat(100));
        assert!(!pattern.matches(&[b'b'; 4096]));
    }

    #[test]
    fn backslashes() {
        assert_eq!(unescaped(b"a\\*b\\\\\\"), b"a*b\\\\");
        assert!(is_pattern(b"a[b]") && !is_pattern(b"ab"));
    }
}
