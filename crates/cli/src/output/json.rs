//! JSON for programs: one value per line, or an array that is written element by element.
//!
//! Strings are those of serde_json, with one addition: every character that a terminal interprets
//! is written as `\uNNNN`, even if JSON allows it in strings, because users look at JSON in
//! terminals.

use std::io::{self, Write};

use serde::Serialize;
use serde_json::ser::{Formatter, Serializer};

use offshoot_vfs::escape::is_unsafe;

/// Writes strings without characters that a terminal would interpret.
struct Harmless;

impl Formatter for Harmless {
    fn write_string_fragment<W: ?Sized + Write>(
        &mut self,
        writer: &mut W,
        fragment: &str,
    ) -> io::Result<()> {
        let mut rest = fragment;
        while let Some((at, character)) = rest.char_indices().find(|(_, c)| is_unsafe(*c)) {
            writer.write_all(&rest.as_bytes()[..at])?;
            // All characters that `is_unsafe` accepts are below U+10000, so four digits are enough.
            write!(writer, "\\u{:04x}", u32::from(character))?;
            rest = &rest[at + character.len_utf8()..];
        }
        writer.write_all(rest.as_bytes())
    }
}

fn write_value<W: Write + ?Sized, T: Serialize>(
    writer: &mut W,
    value: &T,
) -> serde_json::Result<()> {
    value.serialize(&mut Serializer::with_formatter(writer, Harmless))
}

/// Writes `value` on a line of its own.
pub(crate) fn write_line<W: Write + ?Sized, T: Serialize>(
    writer: &mut W,
    value: &T,
) -> serde_json::Result<()> {
    write_value(writer, value)?;
    writer.write_all(b"\n").map_err(serde_json::Error::io)
}

/// An array whose elements are written one by one, and never all in memory.
pub(crate) struct JsonArray<W: Write> {
    writer: W,
    is_empty: bool,
}

impl<W: Write> JsonArray<W> {
    /// Opens the array.
    pub(crate) fn new(mut writer: W) -> io::Result<Self> {
        writer.write_all(b"[")?;
        Ok(Self { writer, is_empty: true })
    }

    /// Writes the next element.
    pub(crate) fn push<T: Serialize>(&mut self, value: &T) -> serde_json::Result<()> {
        let separator: &[u8] = if self.is_empty { b"\n " } else { b",\n " };
        self.is_empty = false;
        self.writer.write_all(separator).map_err(serde_json::Error::io)?;
        write_value(&mut self.writer, value)
    }

    /// Closes the array.
    pub(crate) fn finish(mut self) -> io::Result<()> {
        self.writer.write_all(if self.is_empty { b"]\n" } else { b"\n]\n" })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn strings_are_harmless_and_true() {
        let name = "a\u{1b}\u{9b}\u{202e}\u{7f}\"é";
        let mut line = Vec::new();
        write_line(&mut line, &name).unwrap();
        let line = String::from_utf8(line).unwrap();
        assert_eq!(line, "\"a\\u001b\\u009b\\u202e\\u007f\\\"é\"\n");
        assert_eq!(serde_json::from_str::<String>(&line).unwrap(), name);
    }

    #[test]
    fn arrays_are_json_at_every_length() {
        for length in 0..3u32 {
            let mut bytes = Vec::new();
            let mut array = JsonArray::new(&mut bytes).unwrap();
            (0..length).for_each(|n| array.push(&n).unwrap());
            array.finish().unwrap();
            let parsed: Vec<u32> = serde_json::from_slice(&bytes).unwrap();
            assert_eq!(parsed, (0..length).collect::<Vec<_>>());
        }
    }
}
