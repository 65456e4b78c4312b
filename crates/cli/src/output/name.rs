//! Names on standard output: unchanged for programs, escaped on a terminal.

use std::io::{self, IsTerminal, Write};
use std::sync::OnceLock;

use super::Escaped;

/// Whether standard output is a terminal.
pub(crate) fn is_terminal() -> bool {
    static IS_TERMINAL: OnceLock<bool> = OnceLock::new();
    *IS_TERMINAL.get_or_init(|| io::stdout().is_terminal())
}

/// The bytes to write for a name.
pub(crate) fn shown_name(name: &[u8]) -> Vec<u8> {
    if is_terminal() { Escaped(name).to_string().into_bytes() } else { name.to_vec() }
}

/// Writes a name. Programs such as `xargs` and `diff` need the bytes; a terminal may interpret
/// some.
pub(crate) fn write_name(out: &mut dyn Write, name: &[u8]) -> io::Result<()> {
    if is_terminal() { write!(out, "{}", Escaped(name)) } else { out.write_all(name) }
}
