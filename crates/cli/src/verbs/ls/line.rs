//! One line of a listing. Each column is as wide as its widest value in the directory.

use std::io::{self, Write};

use offshoot_vfs::{Attr, FileSystem, FileType};

use super::color::Colors;
use crate::args::{ColorWhen, LsArguments};
use crate::output::{
    CivilTime, Escaped, ModeLetters, OwnerNames, short_size, shown_inode, write_name,
};

/// Which columns are shown, and in which form.
#[expect(clippy::struct_excessive_bools, reason = "they are the options of ls")]
pub(super) struct Style {
    pub(super) is_long: bool,
    is_numeric: bool,
    is_human: bool,
    has_inode: bool,
    /// Lines end with NUL, and names are not escaped.
    is_zero: bool,
    colors: Option<Colors>,
}

impl Style {
    pub(super) fn new(arguments: &LsArguments) -> Self {
        let colors = if arguments.zero && arguments.color == ColorWhen::Auto {
            None
        } else {
            Colors::wanted(arguments.color)
        };
        Self {
            is_long: arguments.long || arguments.numeric_uid_gid,
            is_numeric: arguments.numeric_uid_gid,
            is_human: arguments.human_readable,
            has_inode: arguments.inode,
            is_zero: arguments.zero,
            colors,
        }
    }

    /// Whether a line needs more than the name.
    pub(super) fn needs_attr(&self) -> bool {
        self.is_long || self.has_inode || self.colors.is_some()
    }

    /// Whether the widths of columns are measured before lines are written.
    pub(super) fn has_columns(&self) -> bool {
        self.is_long || self.has_inode
    }

    /// The line with the total space of a directory.
    pub(super) fn total(&self, bytes: u64) -> String {
        let total =
            if self.is_human { short_size(bytes) } else { bytes.div_ceil(1024).to_string() };
        format!("total {total}")
    }

    fn size(&self, bytes: u64) -> String {
        if self.is_human { short_size(bytes) } else { bytes.to_string() }
    }

    /// Ends a line.
    pub(super) fn end(&self, out: &mut dyn Write) -> io::Result<()> {
        out.write_all(if self.is_zero { b"\0" } else { b"\n" })
    }
}

/// A file in a listing.
pub(super) struct ListedFile<'a> {
    pub(super) attr: &'a Attr,
    pub(super) name: &'a [u8],
    pub(super) owners: &'a OwnerNames,
    pub(super) has_acl: bool,
    /// The target of a symbolic link.
    pub(super) target: Option<&'a [u8]>,
}

/// The widths of the columns of a directory.
#[derive(Default)]
pub(super) struct Widths {
    inode: usize,
    links: usize,
    user: usize,
    group: usize,
    size: usize,
    major: usize,
    minor: usize,
    /// Whether a file has an access control list.
    has_acl: bool,
    /// The space of the files, in bytes.
    pub(super) total: u64,
}

impl Widths {
    /// Makes the columns wide enough for a file.
    pub(super) fn include(&mut self, row: &ListedFile<'_>, style: &Style) {
        let attr = row.attr;
        let most = |width: &mut usize, text: String| *width = text.len().max(*width);
        self.total = self.total.saturating_add(attr.allocated_bytes);
        most(&mut self.inode, shown_inode(attr.file).to_string());
        if !style.is_long {
            return;
        }
        most(&mut self.links, attr.nlink.to_string());
        most(&mut self.user, user(row, style).unwrap_or_else(|| attr.uid.to_string()));
        most(&mut self.group, group(row, style).unwrap_or_else(|| attr.gid.to_string()));
        self.has_acl |= row.has_acl;
        if is_device(attr) {
            most(&mut self.major, attr.rdev.0.to_string());
            most(&mut self.minor, attr.rdev.1.to_string());
            self.size = self.size.max(self.major + 2 + self.minor);
        } else {
            most(&mut self.size, style.size(attr.size));
        }
    }
}

fn is_device(attr: &Attr) -> bool {
    matches!(attr.file_type, FileType::CharDevice | FileType::BlockDevice)
}

fn user(row: &ListedFile<'_>, style: &Style) -> Option<String> {
    let name = row.owners.user(row.attr.uid).filter(|_| !style.is_numeric)?;
    Some(Escaped(name).to_string())
}

fn group(row: &ListedFile<'_>, style: &Style) -> Option<String> {
    let name = row.owners.group(row.attr.gid).filter(|_| !style.is_numeric)?;
    Some(Escaped(name).to_string())
}

/// Whether a file has an access control list, which `ls -l` marks with a `+`.
pub(super) fn has_acl(fs: &dyn FileSystem, attr: &Attr) -> bool {
    let mut has_acl = false;
    let listed = fs.xattrs(attr.file, &mut |name, _| {
        has_acl |= matches!(name, b"system.posix_acl_access" | b"system.posix_acl_default");
        std::ops::ControlFlow::Continue(())
    });
    listed.is_ok() && has_acl
}

/// Writes the line of a file.
pub(super) fn write_row(
    out: &mut dyn Write,
    row: &ListedFile<'_>,
    widths: &Widths,
    style: &mut Style,
) -> io::Result<()> {
    let attr = row.attr;
    if style.has_inode {
        write!(out, "{:>1$} ", shown_inode(attr.file), widths.inode)?;
    }
    if style.is_long {
        let mark = if row.has_acl {
            "+"
        } else if widths.has_acl {
            " "
        } else {
            ""
        };
        write!(out, "{}{mark}", ModeLetters(attr.file_type, attr.permissions))?;
        write!(out, " {:>1$}", attr.nlink, widths.links)?;
        for (name, number, width) in
            [(user(row, style), attr.uid, widths.user), (group(row, style), attr.gid, widths.group)]
        {
            // Names are aligned to the left, numbers to the right.
            match name {
                Some(name) => write!(out, " {name:<width$}")?,
                None => write!(out, " {number:>width$}")?,
            }
        }
        if is_device(attr) {
            let blanks = widths.size - (widths.major + 2 + widths.minor).min(widths.size);
            let (major, minor) = attr.rdev;
            let (major_width, minor_width) = (widths.major + blanks, widths.minor);
            write!(out, " {major:>major_width$}, {minor:>minor_width$}")?;
        } else {
            write!(out, " {:>1$}", style.size(attr.size), widths.size)?;
        }
        write!(out, " {:#} ", CivilTime(attr.mtime))?;
    }
    let mut colors = style.colors.take();
    let written = match &mut colors {
        Some(colors) => colors.write(out, attr, row.name, |out| write_name(out, row.name)),
        None => write_name(out, row.name),
    };
    style.colors = colors;
    written?;
    if let Some(target) = row.target.filter(|_| style.is_long) {
        out.write_all(b" -> ")?;
        write_name(out, target)?;
    }
    style.end(out)
}

/// Writes the line with the path of a directory, above its contents.
pub(super) fn write_header(out: &mut dyn Write, path: &[u8]) -> io::Result<()> {
    write_name(out, path)?;
    out.write_all(b":\n")
}
