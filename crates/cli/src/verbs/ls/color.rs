//! Colours of names, from `LS_COLORS` and the built-in table of `ls`.

use std::collections::HashMap;
use std::ffi::OsStr;
use std::io::{self, Write};
use std::os::unix::ffi::OsStrExt;

use offshoot_vfs::{Attr, FileType};

use crate::args::ColorWhen;
use crate::output::is_terminal;

/// The colours of `ls` if the environment sets none.
const DEFAULT: &[u8] = b"di=01;34:ln=01;36:pi=33:so=01;35:bd=01;33:cd=01;33:ex=01;32:su=37;41:\
                         sg=30;43:st=37;44:ow=34;42:tw=30;42";

/// The colours of one listing.
pub(super) struct Colors {
    /// The codes by the two letters of `LS_COLORS`, or by the suffix of a name, with the leading
    /// `*`.
    codes: HashMap<Vec<u8>, Vec<u8>>,
    /// Whether a name was coloured. Before the first one, the terminal is reset.
    is_used: bool,
}

impl Colors {
    /// The colours, if names are coloured.
    pub(super) fn wanted(when: ColorWhen) -> Option<Self> {
        let is_refused = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
        let is_wanted = match when {
            ColorWhen::Always => true,
            ColorWhen::Auto => is_terminal() && !is_refused,
            ColorWhen::Never => false,
        };
        is_wanted
            .then(|| Self::parse(std::env::var_os("LS_COLORS").as_deref().map(OsStr::as_bytes)))
    }

    fn parse(changes: Option<&[u8]>) -> Self {
        let mut codes = HashMap::new();
        for table in [Some(DEFAULT), changes].into_iter().flatten() {
            for one in table.split(|&byte| byte == b':') {
                let Some(at) = one.iter().position(|&byte| byte == b'=') else { continue };
                let (name, code) = (&one[..at], &one[at + 1..]);
                // Only colour codes are accepted: other bytes must not reach the terminal.
                if code.iter().all(|byte| byte.is_ascii_digit() || *byte == b';') {
                    codes.insert(name.to_vec(), code.to_vec());
                }
            }
        }
        Self { codes, is_used: false }
    }

    fn code(&self, attr: &Attr, name: &[u8]) -> Option<&[u8]> {
        let has = |bits| attr.permissions & bits != 0;
        let keys: &[(bool, &[u8])] = match attr.file_type {
            FileType::Regular => &[(has(0o4000), b"su"), (has(0o2000), b"sg"), (has(0o111), b"ex")],
            FileType::Directory => &[
                (has(0o1000) && has(0o002), b"tw"),
                (has(0o002), b"ow"),
                (has(0o1000), b"st"),
                (true, b"di"),
            ],
            FileType::Symlink => &[(true, b"ln")],
            FileType::Fifo => &[(true, b"pi")],
            FileType::Socket => &[(true, b"so")],
            FileType::BlockDevice => &[(true, b"bd")],
            FileType::CharDevice => &[(true, b"cd")],
        };
        let known = |key: &[u8]| self.codes.get(key).filter(|code| !code.is_empty());
        let by_type = keys.iter().filter(|(is, _)| *is).find_map(|(_, key)| known(key));
        let by_end = || {
            let dots = name.iter().enumerate().filter(|(_, byte)| **byte == b'.');
            dots.map(|(at, _)| [b"*", &name[at..]].concat()).find_map(|end| known(&end))
        };
        let is_plain = attr.file_type == FileType::Regular;
        let code = by_type.or_else(|| by_end().filter(|_| is_plain));
        code.or_else(|| known(b"fi").filter(|_| is_plain)).map(Vec::as_slice)
    }

    /// Writes a name in its colour.
    pub(super) fn write(
        &mut self,
        out: &mut dyn Write,
        attr: &Attr,
        name: &[u8],
        write: impl FnOnce(&mut dyn Write) -> io::Result<()>,
    ) -> io::Result<()> {
        let Some(code) = self.code(attr, name).map(<[u8]>::to_vec) else { return write(out) };
        if !std::mem::replace(&mut self.is_used, true) {
            out.write_all(b"\x1b[0m")?;
        }
        out.write_all(&[b"\x1b[", &code[..], b"m"].concat())?;
        write(out)?;
        out.write_all(b"\x1b[0m")
    }
}

#[cfg(test)]
mod tests {
    use offshoot_testkit::memory::{MemoryFilesystem, ROOT, id};
    use offshoot_vfs::FileSystem;

    use super::*;

    #[test]
    fn the_environment_goes_before_the_table() {
        let mut fs = MemoryFilesystem::new();
        fs.file(ROOT, b"x", 300, b"x");
        let (file, dir) = (fs.attr(id(300)).unwrap(), fs.attr(id(ROOT)).unwrap());
        let colors = Colors::parse(Some(b"di=7:*.tar.gz=31:*.gz=32:ex=\x1b]0;title:bad:*.c="));
        let code = |attr: &Attr, name: &str| {
            colors.code(attr, name.as_bytes()).map(|code| String::from_utf8(code.to_vec()).unwrap())
        };
        assert_eq!(code(&dir, "d").as_deref(), Some("7"));
        assert_eq!(code(&file, "a.tar.gz").as_deref(), Some("31"));
        assert_eq!(code(&file, "a.gz").as_deref(), Some("32"));
        assert_eq!(code(&file, "a.c"), None);
        let program = Attr { permissions: 0o755, ..file };
        assert_eq!(code(&program, "a.gz").as_deref(), Some("01;32"));
    }
}
