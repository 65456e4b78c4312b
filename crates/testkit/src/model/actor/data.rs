//! The operations of an actor on the data of files.
//!
//! Offsets and lengths range from a byte to many sectors. Most are near the beginning, where the
//! writes to one file overlap; some are far behind the end, and some are beyond the largest file
//! size.

use offshoot_vfs::{
    Dedupe, Fallocate, FileFlags, FileId, FilePosition, FileSystem, FileSystemMut, FileType,
    SetAttr,
};

use super::super::ModelManners;
use super::{Actor, ActorFile};

/// The offset from which on no file can have data.
const TOO_FAR: u64 = i64::MAX.cast_unsigned();

impl Actor<'_> {
    /// A file found by its name, or one that is open and may have no name.
    pub(super) fn file_or_open(&mut self) -> Option<ActorFile> {
        if self.opened.is_empty() || self.random.below(3) > 0 {
            return self.file();
        }
        let index = self.random.below(self.opened.len() as u64);
        Some(self.opened[usize::try_from(index).expect("a small index")])
    }

    /// A random number below `2^bits`: each number of bits is equally likely.
    fn any_size(&mut self, bits: u64) -> u64 {
        let bits = self.random.below(bits + 1);
        self.random.below(1 << bits)
    }

    /// A random offset in or behind a file. With `is_far` it may be very far behind.
    fn offset(&mut self, is_far: bool) -> u64 {
        match self.random.below(20) {
            0 if is_far => self.any_size(44),
            0..4 => self.any_size(22),
            4..8 => self.any_size(10) * 4096,
            _ => self.any_size(16),
        }
    }

    fn len(&mut self) -> usize {
        let len = match self.random.below(20) {
            0 => self.any_size(20),
            1..4 => self.any_size(6) * 4096,
            _ => self.any_size(13),
        };
        usize::try_from(len).expect("at most a MiB")
    }

    pub(super) fn write(&mut self) {
        let Some(file) = self.file_or_open() else { return };
        // The filesystem may refuse a longer write after its beginning is written.
        let (len, piece) =
            if self.may_be_full { (self.len().min(1 << 15), 1 << 15) } else { (self.len(), 1) };
        let offset = match self.random.below(100) {
            0 => TOO_FAR - self.random.below(1 + len as u64 / 2),
            _ => self.offset(true) / piece * piece,
        };
        let data = if self.random.below(4) == 0 {
            vec![u8::try_from(self.random.below(3)).expect("small"); len]
        } else {
            self.random.bytes(len)
        };
        let (at, is_direct) = (self.at, self.random.below(8) == 0);
        self.both("write", |fs, of| {
            if is_direct {
                return fs.write_direct(of(file), offset, &data, at);
            }
            fs.write(of(file), offset, &data, at)
        });
    }

    /// Truncates a file, or extends it by a hole.
    pub(super) fn resize(&mut self) {
        let Some(file) = self.file_or_open() else { return };
        let size = match self.random.below(50) {
            0 => TOO_FAR + 1 + self.random.below(10),
            _ => self.offset(true),
        };
        let (set, at) = (SetAttr { size: Some(size), ..SetAttr::default() }, self.at);
        self.both("truncate", |fs, of| fs.set_attr(of(file), &set, at));
    }

    /// Allocates, frees, zeros or moves a range. The range mostly consists of whole sectors.
    pub(super) fn fallocate(&mut self) {
        let Some(file) = self.file_or_open() else { return };
        let keeps_size = self.random.below(2) == 0;
        let what = match self.random.below(8) {
            0..3 => Fallocate::Allocate { keeps_size },
            3 => Fallocate::Zero { keeps_size },
            4 => Fallocate::Collapse,
            5 => Fallocate::Insert,
            _ => Fallocate::PunchHole,
        };
        let (offset, len) = match self.random.below(50) {
            0 => (TOO_FAR - self.random.below(5000), 4096),
            1..10 => (self.offset(false), self.any_size(16)),
            _ => (self.any_size(6) * 4096, (1 + self.any_size(5)) * 4096),
        };
        // The filesystem may zero partial sectors before it refuses the rest.
        let what = match what {
            Fallocate::Zero { .. } if self.may_be_full => Fallocate::PunchHole,
            what => what,
        };
        let whole = |at: u64| if self.may_be_full { at / 4096 * 4096 } else { at };
        let (offset, len) = (whole(offset), whole(len));
        let at = self.at;
        self.both("fallocate", |fs, of| fs.fallocate(of(file), what, offset, len, at));
    }

    /// Clones, dedupes or copies a range of one file to another place, mostly in another file.
    pub(super) fn share(&mut self) {
        let (Some(from), Some(to)) = (self.file_or_open(), self.file_or_open()) else { return };
        let mut place = || match self.random.below(4) {
            0 => self.any_size(15),
            _ => self.any_size(5) * 4096,
        };
        let (offset, to_offset, mut len) = (place(), place(), place());
        let rest = self.both("size", |fs, of| Ok(fs.attr(of(from))?.size.saturating_sub(offset)));
        if let Some((_, rest)) = rest
            && self.random.below(3) == 0
        {
            len = rest.min(1 << 20);
        }
        // The filesystem may refuse a longer range after its beginning is done.
        let len = if self.may_be_full { len.min(1 << 17) } else { len };
        // After a refused copy, no call returns how much of it was done.
        let kind = self.random.below(if self.may_be_full { 3 } else { 4 });
        // The model knows only one kind of file without checksums: those with the flag NODATACOW.
        let kind = match self.unsummed {
            Some(unsummed) => {
                let looks = |file: ActorFile| {
                    let flags = self.model.flags(file.model).unwrap_or_default();
                    (unsummed.contains(&file.ours), flags.contains(FileFlags::NODATACOW))
                };
                let is_known = |file: ActorFile| {
                    !unsummed.contains(&file.ours) || !self.reflagged.contains(&file.ours)
                };
                let are_alike = looks(from) == looks(to) && is_known(from) && is_known(to);
                if are_alike { kind } else { 3 }
            }
            None => kind,
        };
        // Inline data cannot be shared. If inline data is zeros, a destination that is a hole is
        // equal and stays a hole; but the model has no inline data.
        let mut first = [0; 4096];
        let is_read = offset == 0 && self.model.read(from.model, 0, &mut first).is_ok();
        let kind = if kind == 2 && is_read && first == [0; 4096] { 0 } else { kind };
        let at = self.at;
        let shared =
            self.both("share", |fs: &dyn FileSystemMut, of: &dyn Fn(ActorFile) -> FileId| {
                let from = FilePosition { file: of(from), offset };
                let to = FilePosition { file: of(to), offset: to_offset };
                match kind {
                    0..2 => fs.clone_range(from, to, len, at).map(|()| 0),
                    2 => fs.dedupe_range(from, to, len).map(|found| match found {
                        Dedupe::Same { len } => len,
                        Dedupe::Differs => u64::MAX,
                    }),
                    _ => fs.copy_range(from, to, len, at),
                }
            });
        if let Some((ours, model)) = shared {
            let actor = self.prefix.escape_ascii();
            assert_eq!(ours, model, "sharing {len} bytes of {from:?} with {to:?} by {actor}");
        }
    }

    /// Reads a file in one of several ways.
    pub(super) fn read(&mut self) {
        let Some(file) = self.file_or_open() else { return };
        // No system call reads the data of a symbolic link, so there is nothing to compare with.
        let file_type = self.file_type(file);
        if file_type == Some(FileType::Symlink) {
            return;
        }
        let (offset, len) = (self.offset(false), self.len());
        let prefix = self.prefix.escape_ascii().to_string();
        let what = format!("{len} bytes at {offset} of {file:?} by {prefix}");
        let is_known = file_type != Some(FileType::Directory)
            || self.model.state().manners == ModelManners::Btrfs;
        if let Some((ours, model)) = self.both("size", |fs, of| Ok(fs.attr(of(file))?.size))
            && is_known
        {
            assert_eq!(ours, model, "size of {file:?} by {prefix}");
        }
        let read = self.both("read", |fs, of| {
            let mut bytes = vec![0xa5; len];
            let count = fs.read(of(file), offset, &mut bytes)?;
            bytes.truncate(count);
            Ok(bytes)
        });
        if let Some((ours, model)) = read {
            assert_eq!(ours.len(), model.len(), "count of {what}");
            let differs = ours.iter().zip(&model).position(|(ours, model)| ours != model);
            assert_eq!(differs, None, "first byte that differs of {what}");
        }
        if !self.sees_holes {
            return;
        }
        let next = self.both("next_data", |fs, of| fs.next_data(of(file), offset));
        if let Some((ours, model)) = next {
            assert_eq!(ours, model, "data from {offset} on of {file:?} by {prefix}");
        }
    }
}
