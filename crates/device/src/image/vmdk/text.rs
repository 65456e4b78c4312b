//! The text of a descriptor.
//!
//! ```text
//!   # Disk DescriptorFile
//!   CID=46e1c6d4                                   changes when the disk does
//!   parentCID=ffffffff                             this value: it has no parent image
//!   RW 2097152 FLAT "disk-flat.vmdk" 0             access, sectors, type, file, first sector in it
//! ```

use std::ffi::{OsStr, OsString};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::time::{SystemTime, UNIX_EPOCH};

use parking_lot::Mutex;

use super::{SECTOR_BYTES, WAY};
use crate::BlockDevice;
use crate::fields::invalid;
use crate::image::mapped::part;
use crate::image::unsupported;

/// What a descriptor allows for an extent.
#[derive(Clone, Copy, Debug)]
pub(super) enum ExtentAccess {
    Write,
    Read,
    None,
}

/// A line of the descriptor that describes an extent.
#[derive(Debug)]
pub(super) struct ExtentLine {
    pub(super) access: ExtentAccess,
    pub(super) size_bytes: u64,
    pub(super) kind: String,
    pub(super) file: Option<OsString>,
    /// Its first byte in the file.
    pub(super) offset: u64,
}

impl ExtentLine {
    /// Refuses an extent that the descriptor marks NOACCESS.
    pub(super) fn check_readable(&self) -> io::Result<()> {
        if matches!(self.access, ExtentAccess::None) {
            return Err(unsupported(format!(
                "its descriptor says that an extent is not to be accessed (NOACCESS): {WAY}"
            )));
        }
        Ok(())
    }

    /// Refuses an extent that the descriptor does not mark RW.
    pub(super) fn check_writable(&self) -> io::Result<()> {
        if !self.is_writable() {
            return Err(unsupported(format!(
                "its descriptor says that an extent is only read (RDONLY), so it is not written: \
                 {WAY}"
            )));
        }
        Ok(())
    }

    pub(super) fn is_writable(&self) -> bool {
        matches!(self.access, ExtentAccess::Write)
    }

    /// The error for an extent of an unknown type.
    pub(super) fn unknown_kind(&self) -> io::Error {
        unsupported(format!("an extent of type {:?} is not read here: {WAY}", self.kind))
    }
}

/// The parsed descriptor.
#[derive(Debug)]
pub(super) struct DescriptorText {
    pub(super) content_id: ContentId,
    pub(super) has_parent: bool,
    /// Another file tracks which blocks changed, for the next backup.
    has_change_track: bool,
    pub(super) extents: Vec<ExtentLine>,
}

impl DescriptorText {
    /// Reads a text of `len` bytes from byte `at` on.
    pub(super) fn read(device: &dyn BlockDevice, at: u64, len: u64) -> io::Result<Self> {
        let bytes = part(device, at, len)?;
        // In a sparse extent the text is padded with zeros.
        let text = bytes.split(|&byte| byte == 0).next().unwrap_or_default();
        let mut found = Self {
            content_id: ContentId { place: None, is_changed: Mutex::new(false) },
            has_parent: false,
            has_change_track: false,
            extents: Vec::new(),
        };
        let mut line_at = at;
        for whole in text.split_inclusive(|&byte| byte == b'\n') {
            let line = whole.trim_ascii();
            if let Some(id) = whole.strip_prefix(b"CID=").map(<[u8]>::trim_ascii_end) {
                let is_number = (1..=8).contains(&id.len()) && id.iter().all(u8::is_ascii_hexdigit);
                found.content_id.place = is_number.then(|| (line_at + 4, id.to_vec()));
            } else if let Some(parent) = line.strip_prefix(b"parentCID=") {
                found.has_parent = !parent.eq_ignore_ascii_case(b"ffffffff");
            } else if line.starts_with(b"changeTrackPath") {
                found.has_change_track = true;
            } else if let Some(extent) = extent(line)? {
                found.extents.push(extent);
            }
            line_at += whole.len() as u64;
        }
        Ok(found)
    }

    /// Refuses a disk with change tracking, because a write would make the tracked changes wrong.
    pub(super) fn check_writable(&self) -> io::Result<()> {
        if self.has_change_track {
            return Err(unsupported(format!(
                "a VMDK whose changes are tracked for backups (changeTrackPath) is not written: \
                 {WAY}"
            )));
        }
        Ok(())
    }
}

/// The extent that `line` describes; `None` for a line about something else.
fn extent(line: &[u8]) -> io::Result<Option<ExtentLine>> {
    let kinds: [(&[u8], ExtentAccess); 3] = [
        (b"RW ", ExtentAccess::Write),
        (b"RDONLY ", ExtentAccess::Read),
        (b"NOACCESS ", ExtentAccess::None),
    ];
    let access =
        |(word, access): &(&[u8], ExtentAccess)| Some((line.strip_prefix(*word)?, *access));
    let Some((rest, access)) = kinds.iter().find_map(access) else { return Ok(None) };
    let wrong = || {
        let shown = String::from_utf8_lossy(line);
        invalid(format!("an extent in its descriptor makes no sense: {shown:?}"))
    };
    extent_of(rest, access).map(Some).ok_or_else(wrong)
}

fn extent_of(rest: &[u8], access: ExtentAccess) -> Option<ExtentLine> {
    let word = |bytes: &mut &[u8]| -> Option<String> {
        let text = bytes.trim_ascii_start();
        let end = text.iter().position(|&byte| byte == b' ').unwrap_or(text.len());
        let (word, rest) = text.split_at(end);
        *bytes = rest;
        Some(std::str::from_utf8(word).ok()?.to_owned())
    };
    let bytes_of = |sectors: &str| sectors.parse::<u64>().ok()?.checked_mul(SECTOR_BYTES);
    let mut rest = rest;
    let size_bytes = bytes_of(&word(&mut rest)?).filter(|&size| size > 0)?;
    let kind = word(&mut rest).filter(|kind| !kind.is_empty())?;
    let (mut file, mut offset) = (None, 0);
    if let Some(quoted) = rest.trim_ascii_start().strip_prefix(b"\"") {
        let end = quoted.iter().rposition(|&byte| byte == b'"')?;
        file = Some(OsStr::from_bytes(&quoted[..end]).to_owned());
        rest = quoted[end + 1..].trim_ascii_start();
        if !rest.is_empty() {
            offset = bytes_of(&word(&mut rest)?)?;
        }
    }
    Some(ExtentLine { access, size_bytes, kind, file, offset })
}

/// The content id, a number that changes with the first write to an opened disk.
#[derive(Debug)]
pub(super) struct ContentId {
    /// The byte of the file at which its hexadecimal digits begin, and these digits.
    place: Option<(u64, Vec<u8>)>,
    is_changed: Mutex<bool>,
}

impl ContentId {
    /// Changes the number on the medium. Only the first call does so.
    pub(super) fn change(&self, device: &dyn BlockDevice) -> io::Result<()> {
        let mut is_changed = self.is_changed.lock();
        if *is_changed {
            return Ok(());
        }
        if let Some((at, old)) = &self.place {
            let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
            // Any number that differs from the old one will do; we take the last digits of the
            // time. QEMU writes no leading zeros, so there may be fewer than eight digits.
            let digits =
                |number: u64| format!("{number:08x}").into_bytes().split_off(8 - old.len());
            let new = [now, now ^ 1].map(|number| digits(number & u64::from(u32::MAX)));
            let is_old = new[0].eq_ignore_ascii_case(old);
            device.write_at(*at, &new[usize::from(is_old)])?;
        }
        device.flush()?;
        *is_changed = true;
        Ok(())
    }
}
