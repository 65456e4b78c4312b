//! The words of a line, and the escapes of vis(3) in them.
//!
//! A word ends at white space, which is escaped in names: `a\040b` or `a\sb`. A word that begins
//! with `#` begins a comment.

use crate::build::manifest::hex_byte;

/// The words of `line`, still escaped.
pub(super) fn words(line: &[u8]) -> impl DoubleEndedIterator<Item = &[u8]> {
    let is_space = |byte: &u8| matches!(byte, b' ' | b'\t' | b'\r' | b'\x0b' | b'\x0c');
    let mut end = line.len();
    let mut is_start = true;
    for (at, byte) in line.iter().enumerate() {
        if is_start && *byte == b'#' {
            end = at;
            break;
        }
        is_start = is_space(byte);
    }
    let line = line.get(..end).unwrap_or_default();
    line.split(move |byte| is_space(byte)).filter(|word| !word.is_empty())
}

/// Whether the line goes on in the next one: it ends with a backslash that no other one escapes.
pub(super) fn goes_on(line: &[u8]) -> bool {
    line.iter().rev().take_while(|&&byte| byte == b'\\').count() % 2 == 1
}

/// The bytes that `text` stands for; `None` for what is no escape of vis(3).
pub(super) fn unescaped(text: &[u8]) -> Option<Vec<u8>> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text;
    while let Some((&byte, after)) = rest.split_first() {
        rest = after;
        if byte != b'\\' {
            bytes.push(byte);
            continue;
        }
        let (&letter, after) = rest.split_first()?;
        rest = after;
        let stands_for = match letter {
            b'0'..=b'7' => {
                let digits = rest.iter().take(2).take_while(|digit| matches!(digit, b'0'..=b'7'));
                let digits = digits.count();
                let number = rest.iter().take(digits);
                let first = u32::from(letter - b'0');
                let number = number.fold(first, |sum, digit| sum * 8 + u32::from(digit - b'0'));
                rest = rest.get(digits..)?;
                u8::try_from(number).ok()?
            }
            b'x' => {
                let (byte, after) = hex_byte(rest)?;
                rest = after;
                byte
            }
            b'a' => 7,
            b'b' => 8,
            b'f' => 12,
            b'n' => b'\n',
            b'r' => b'\r',
            b's' => b' ',
            b't' => b'\t',
            b'v' => 11,
            b'E' => 0x1b,
            b'^' => {
                let (&letter, after) = rest.split_first()?;
                rest = after;
                control(letter)
            }
            b'M' => {
                let (&[sign, letter], after) = rest.split_first_chunk::<2>()?;
                rest = after;
                0x80 | match sign {
                    b'-' => letter,
                    b'^' => control(letter),
                    _ => return None,
                }
            }
            // A mark where something was hidden.
            b'$' => continue,
            letter if letter.is_ascii_graphic() => letter,
            _ => return None,
        };
        bytes.push(stands_for);
    }
    Some(bytes)
}

/// The control character of a letter: `?` is the one of 127.
fn control(letter: u8) -> u8 {
    if letter == b'?' { 0x7f } else { letter & 0x1f }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_end_at_white_space_and_comments() {
        let split = |line: &'static str| -> Vec<&str> {
            words(line.as_bytes()).map(|word| std::str::from_utf8(word).expect("text")).collect()
        };
        assert_eq!(split("  a#b\ttype=dir  # said"), ["a#b", "type=dir"]);
        assert_eq!(split("# all of it"), [""; 0]);
        assert_eq!(split(r"\#a b\#"), [r"\#a", r"b\#"]);
        for (line, expected) in [(r"a \", true), (r"a \\", false), (r"a \\\", true), ("a", false)] {
            assert_eq!(goes_on(line.as_bytes()), expected, "{line}");
        }
    }

    #[test]
    fn escapes_stand_for_bytes() {
        for (text, bytes) in [
            (r"a\040b\sc", &b"a b c"[..]),
            (r"\M-C\M-<\M^?\^?\^A", &[0xc3, 0xbc, 0xff, 0x7f, 1]),
            (r"\\b\#\=\133\303\0", &[b'\\', b'b', b'#', b'=', b'[', 0xc3, 0]),
            (r"\t\n\E\x2f\$\07x", &[9, 10, 0x1b, b'/', 7, b'x']),
        ] {
            assert_eq!(unescaped(text.as_bytes()).as_deref(), Some(bytes), "{text}");
        }
        for text in [r"\", r"\400", r"\M", r"\M-", r"\Mx1", r"\xg0", r"\x+1", "\\\u{80}"] {
            assert_eq!(unescaped(text.as_bytes()), None, "{text}");
        }
    }
}
