//! Names as text that is safe to print.
//!
//! A name in a volume is any bytes but `/` and NUL. Printed raw it could move the
//! cursor, retitle the terminal, or look like two lines. Two forms make text of it,
//! and both can be turned back into the bytes:
//!
//! | bytes | on a line ([`Escaped`]) | in a JSON string ([`json_name`]) |
//! |---|---|---|
//! | `\` | `\\` | `\\` (which JSON writes as `\\\\`) |
//! | not UTF-8 | `\xNN` for each byte | `\xNN` for each byte |
//! | control and invisible characters | `\n`, `\t`, `\r`, else `\u{NN}` | themselves, which JSON writes as `\u00NN` |
//! | all else | itself | itself |
//!
//! Invisible are the characters that change what the text around them looks like:
//! bidirectional overrides and isolates, line and paragraph separators, and the
//! zero-width ones.

use std::borrow::Cow;
use std::fmt;

/// Whether printing this character does something other than showing it.
#[must_use]
pub fn is_unsafe(character: char) -> bool {
    character.is_control()
        || matches!(
            character,
            '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{2069}' | '\u{feff}'
        )
}

/// Shows bytes as one line of harmless text.
#[derive(Clone, Copy)]
pub struct Escaped<'a>(pub &'a [u8]);

impl fmt::Display for Escaped<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for chunk in self.0.utf8_chunks() {
            for character in chunk.valid().chars() {
                match character {
                    '\\' => f.write_str("\\\\")?,
                    other => write_character(f, other)?,
                }
            }
            write_bytes(f, chunk.invalid())?;
        }
        Ok(())
    }
}

fn write_character(f: &mut dyn fmt::Write, character: char) -> fmt::Result {
    match character {
        '\n' => f.write_str("\\n"),
        '\t' => f.write_str("\\t"),
        '\r' => f.write_str("\\r"),
        other if is_unsafe(other) => write!(f, "\\u{{{:x}}}", u32::from(other)),
        other => f.write_char(other),
    }
}

fn write_bytes(f: &mut dyn fmt::Write, bytes: &[u8]) -> fmt::Result {
    bytes.iter().try_for_each(|byte| write!(f, "\\x{byte:02x}"))
}

/// A message that may quote names: what is unsafe is escaped, a backslash stays, because
/// the names in it may have been escaped already.
pub fn message(text: &str) -> Cow<'_, str> {
    if !text.chars().any(is_unsafe) {
        return Cow::Borrowed(text);
    }
    let mut safe = String::with_capacity(text.len() + 16);
    for character in text.chars() {
        // Writing to a string does not fail.
        let _ = write_character(&mut safe, character);
    }
    Cow::Owned(safe)
}

/// The JSON form of a name, before JSON's own escaping.
#[must_use]
pub fn json_name(name: &[u8]) -> String {
    let mut text = String::with_capacity(name.len());
    for chunk in name.utf8_chunks() {
        for character in chunk.valid().chars() {
            if character == '\\' {
                text.push('\\');
            }
            text.push(character);
        }
        // Writing to a string does not fail.
        let _ = write_bytes(&mut text, chunk.invalid());
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn escaped(bytes: &[u8]) -> String {
        Escaped(bytes).to_string()
    }

    #[test]
    fn harmless_names_stay_as_they_are() {
        assert_eq!(escaped("grün ファイル 'x'".as_bytes()), "grün ファイル 'x'");
    }

    #[test]
    fn a_name_cannot_speak_to_the_terminal() {
        assert_eq!(escaped(b"\x1b[2Jx"), "\\u{1b}[2Jx");
        // C1 control sequence introducer, once as UTF-8 and once as a raw byte.
        assert_eq!(escaped(b"\xc2\x9b31m"), "\\u{9b}31m");
        assert_eq!(escaped(b"\x9b31m"), "\\x9b31m");
        assert_eq!(escaped("a\u{202e}b".as_bytes()), "a\\u{202e}b");
        assert_eq!(escaped(b"two\nlines\\"), "two\\nlines\\\\");
        assert_eq!(escaped(b"\x7f"), "\\u{7f}");
    }

    #[test]
    fn different_names_have_different_texts() {
        let all: Vec<Vec<u8>> = (0..=255u8).map(|byte| vec![byte]).collect();
        let mut lines: Vec<String> = all.iter().map(|name| escaped(name)).collect();
        let mut json: Vec<String> = all.iter().map(|name| json_name(name)).collect();
        lines.push(escaped(b"\\x80"));
        json.push(json_name(b"\\x80"));
        for texts in [&mut lines, &mut json] {
            texts.sort();
            texts.dedup();
            assert_eq!(texts.len(), 257);
        }
    }

    #[test]
    fn messages_keep_their_backslashes() {
        assert_eq!(message("/a\\n: gone"), "/a\\n: gone");
        assert_eq!(message("/a\n: gone"), "/a\\n: gone");
    }
}
