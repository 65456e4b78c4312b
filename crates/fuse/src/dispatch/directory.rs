//! The entries of directories.
//!
//! The place behind an entry is its cookie plus 2: an entry with the cookie 7 ends at place 9. `.`
//! and `..` come before all others; they end at places 1 and 2. READDIRPLUS also returns the node
//! and the attributes of each file, as a lookup would. That saves one lookup for each file that a
//! program lists with its attributes.

use std::ops::ControlFlow;

use offshoot_vfs::{Errno, Error, FileId, FileType, Result};
use zerocopy::IntoBytes;

use super::RequestContext;
use crate::output::AnswerBody;
use crate::request::RequestArguments;
use crate::wire::{
    Dirent, EntryOut, FOPEN_CACHE_DIR, FOPEN_KEEP_CACHE, OpenOut, ReadIn, ReleaseIn,
};

/// The place behind `.` and `..`, from which cookies count.
const DOTS: u64 = 2;

/// An entry of the answer.
struct ListedEntry {
    name: Vec<u8>,
    file: FileId,
    file_type: FileType,
    /// The place behind it.
    place: u64,
}

impl ListedEntry {
    /// How many bytes an entry takes in an answer, with `head` bytes before it.
    fn len(name: &[u8], head: usize) -> usize {
        head + (size_of::<Dirent>() + name.len()).next_multiple_of(8)
    }
}

impl RequestContext<'_> {
    pub(super) fn opendir(&self, out: &mut AnswerBody<'_>) -> Result<()> {
        let open_flags = FOPEN_KEEP_CACHE | FOPEN_CACHE_DIR;
        out.put(&OpenOut { fh: self.to.listings.open(), open_flags, ..OpenOut::default() })
    }

    pub(super) fn releasedir(&self, mut arguments: RequestArguments<'_>) -> Result<()> {
        let release: ReleaseIn = arguments.take()?;
        self.to.listings.set_end(release.fh, None);
        if let Some(ioctls) = &self.to.options.ioctls {
            ioctls.closed(release.fh);
        }
        Ok(())
    }

    pub(super) fn readdir(
        &self,
        mut arguments: RequestArguments<'_>,
        out: &mut AnswerBody<'_>,
    ) -> Result<()> {
        let read: ReadIn = arguments.take()?;
        for entry in self.entries(&read, 0, out.room())? {
            self.put_entry_name(&entry, out)?;
        }
        Ok(())
    }

    pub(super) fn readdirplus(
        &self,
        mut arguments: RequestArguments<'_>,
        out: &mut AnswerBody<'_>,
    ) -> Result<()> {
        let read: ReadIn = arguments.take()?;
        for entry in self.entries(&read, size_of::<EntryOut>(), out.room())? {
            // Without a node the kernel caches only the name, and looks the file up when a program
            // asks for it. Then the lookup returns the error.
            let told = if entry.place <= DOTS { None } else { self.told(entry.file).ok() };
            out.put(&told.unwrap_or_default())?;
            self.put_entry_name(&entry, out)?;
        }
        Ok(())
    }

    /// As many entries as fit into `room`, each with `head` bytes before it.
    fn entries(&self, read: &ReadIn, head: usize, room: usize) -> Result<Vec<ListedEntry>> {
        let dir = self.file()?;
        if read.offset == 0 {
            self.to.listings.set_end(read.fh, None);
        }
        let mut room = room.min(usize::try_from(read.size).unwrap_or(usize::MAX));
        let mut shown = Vec::new();
        let mut take = |name: &[u8], file, file_type, place| {
            let Some(rest) = room.checked_sub(ListedEntry::len(name, head)) else { return false };
            room = rest;
            shown.push(ListedEntry { name: name.to_vec(), file, file_type, place });
            true
        };
        let directory = FileType::Directory;
        if read.offset < 1 && !take(b".", dir, directory, 1) {
            return Ok(shown);
        }
        if read.offset < DOTS {
            let parent = self.fs().parent(dir)?.map_or(dir, |parent| parent.dir);
            if !take(b"..", parent, directory, DOTS) {
                return Ok(shown);
            }
        }
        let after = read.offset.saturating_sub(DOTS);
        let end = self.to.listings.end(read.fh);
        let (mut last, mut is_whole, mut is_too_far) = (after, true, false);
        self.fs().read_dir(dir, after, &mut |entry| {
            if end.is_some_and(|end| entry.cookie > end) {
                return ControlFlow::Break(());
            }
            // Places are signed 64-bit numbers in system calls.
            let place =
                entry.cookie.checked_add(DOTS).filter(|&place| i64::try_from(place).is_ok());
            let Some(place) = place else {
                is_too_far = true;
                return ControlFlow::Break(());
            };
            let is_taken = take(entry.name, entry.file, entry.file_type, place);
            if is_taken {
                last = entry.cookie;
                ControlFlow::Continue(())
            } else {
                is_whole = false;
                ControlFlow::Break(())
            }
        })?;
        if end.is_none() {
            let end = if is_whole { last } else { self.last_cookie(dir, last)? };
            self.to.listings.set_end(read.fh, Some(end));
        }
        if is_too_far && shown.is_empty() {
            return Err(Error::posix(Errno::OVERFLOW, format!("the entries of {dir}")));
        }
        Ok(shown)
    }

    /// The cookie of the last entry of `dir`, or `after` if no entry comes behind that. Steps
    /// forward by 1, 2, 4, ... cookies until no entry lies behind, and then bisects.
    fn last_cookie(&self, dir: FileId, after: u64) -> Result<u64> {
        let next = |after: u64| -> Result<Option<u64>> {
            let mut next = None;
            self.fs().read_dir(dir, after, &mut |entry| {
                next = Some(entry.cookie);
                ControlFlow::Break(())
            })?;
            Ok(next)
        };
        let (mut last, mut step) = (after, 1_u64);
        while let Some(cookie) = next(last.saturating_add(step))? {
            last = cookie;
            step = step.saturating_mul(2);
        }
        let mut none_behind = last.saturating_add(step);
        while last < none_behind {
            let middle = last + (none_behind - last) / 2;
            match next(middle)? {
                Some(cookie) => last = cookie,
                None => none_behind = middle,
            }
        }
        Ok(last)
    }

    /// Adds an entry without its attributes.
    fn put_entry_name(&self, entry: &ListedEntry, out: &mut AnswerBody<'_>) -> Result<()> {
        let len = entry.name.len();
        let head = Dirent {
            ino: self.number(entry.file),
            off: entry.place,
            namelen: u32::try_from(len).expect("a short name"),
            file_type: entry.file_type.mode_bits() >> 12,
        };
        out.put_bytes(head.as_bytes())?;
        out.put_bytes(&entry.name)?;
        let end = (size_of::<Dirent>() + len).next_multiple_of(8);
        out.put_bytes(&[0; 8][..end - size_of::<Dirent>() - len])
    }
}
