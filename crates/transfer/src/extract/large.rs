//! Large files, which several workers write at once.
//!
//! The walk makes the file and hands out the ranges that hold data, at most [`PART_BYTES`] each.
//! The last thread to release the file gives it its size and its attributes. When a part failed,
//! that thread removes the file, unless it was there before.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use offshoot_vfs::{Attr, Error, HeldFile, SafeName, Structure};

use super::context::{ExtractTrouble, TransferContext};
use super::directory::ExtractDirectoryRef;
use super::existing::{ExtractTarget, TargetKind};
use super::file;

/// Files from this size on are handed out in parts.
pub(crate) const LARGE_BYTES: u64 = 32 << 20;

/// The most that is in one part.
const PART_BYTES: u64 = 16 << 20;

/// A file that is written in parts.
pub(crate) struct LargeFile<'a> {
    context: &'a TransferContext<'a>,
    directory: ExtractDirectoryRef<'a>,
    name: SafeName,
    _held: HeldFile<'a>,
    attr: Attr,
    target: ExtractTarget,
    has_failed: AtomicBool,
}

/// A share in a large file.
pub(crate) struct LargeRef<'a>(Option<Arc<LargeFile<'a>>>);

impl<'a> LargeRef<'a> {
    /// A large file that `target` becomes.
    pub(crate) fn new(
        context: &'a TransferContext<'a>,
        directory: ExtractDirectoryRef<'a>,
        name: SafeName,
        held: HeldFile<'a>,
        attr: Attr,
        target: ExtractTarget,
    ) -> Self {
        let has_failed = AtomicBool::new(false);
        let large = LargeFile { context, directory, name, _held: held, attr, target, has_failed };
        Self(Some(Arc::new(large)))
    }

    fn large(&self) -> &LargeFile<'a> {
        self.0.as_ref().expect("only `drop` takes it, and nothing runs after it")
    }

    /// Calls with another share for every part, in ascending order, until one is refused.
    pub(crate) fn for_each_part(&self, mut call: impl FnMut(Self, Range<u64>) -> bool) {
        let large = self.large();
        let mut parts = Parts::new(large.attr.size, PART_BYTES);
        loop {
            match parts.next(|at| large.context.fs.next_data(large.attr.file, at)) {
                Ok(Some(part)) if call(Self(self.0.clone()), part.clone()) => {}
                Ok(Some(_)) => {
                    return self.fail(&ExtractTrouble::Host("stopped", rustix::io::Errno::INTR));
                }
                Ok(None) => return,
                Err(error) => return self.fail(&error.into()),
            }
        }
    }

    /// Copies one part.
    pub(crate) fn copy(&self, part: Range<u64>) {
        let large = self.large();
        if large.has_failed.load(Ordering::Relaxed) {
            return;
        }
        if let Err(trouble) = file::copy(large.context, &large.target.file, large.attr.file, part) {
            self.fail(&trouble);
        }
    }

    /// A part is not copied, because all must end: then the file goes.
    pub(crate) fn give_up(&self) {
        self.large().has_failed.store(true, Ordering::Relaxed);
    }

    fn fail(&self, trouble: &ExtractTrouble) {
        let large = self.large();
        // One message for the file; the other parts may fail for the same reason.
        if !large.has_failed.swap(true, Ordering::Relaxed) {
            let path = large.context.path(large.directory.file(), &large.name);
            large.context.report(&path, trouble);
        }
    }
}

impl Drop for LargeRef<'_> {
    fn drop(&mut self) {
        // Of several threads that let go at once, exactly one gets it.
        let Some(large) = self.0.take().and_then(Arc::into_inner) else { return };
        let LargeFile { _held: _, context, directory, name, attr, target, has_failed } = large;
        let remove = || {
            if target.kind == TargetKind::New {
                file::remove(context, &directory, &name, &attr);
            }
        };
        if has_failed.into_inner() {
            return remove();
        }
        match file::set_size(&target.file, attr.size) {
            Ok(()) => match file::finish(context, &directory, &name, &attr, &target) {
                Ok(()) => {
                    context.count_file();
                }
                Err(trouble) => context.report(&context.path(directory.file(), &name), &trouble),
            },
            Err(trouble) => {
                remove();
                context.report(&context.path(directory.file(), &name), &trouble);
            }
        }
    }
}

/// The ranges of a file that hold data, cut into parts.
pub(crate) struct Parts {
    at: u64,
    data: Range<u64>,
    size: u64,
    part_bytes: u64,
}

impl Parts {
    /// The parts of a file of `size` bytes, each at most `part_bytes` long.
    pub(crate) fn new(size: u64, part_bytes: u64) -> Self {
        Self { at: 0, data: 0..0, size, part_bytes }
    }

    /// The next part; `next_data` is that of the file.
    pub(crate) fn next(
        &mut self,
        next_data: impl FnOnce(u64) -> Result<Option<Range<u64>>, Error>,
    ) -> Result<Option<Range<u64>>, Error> {
        if self.at >= self.data.end {
            if self.at >= self.size {
                return Ok(None);
            }
            let Some(data) = next_data(self.at)? else { return Ok(None) };
            if data.start < self.at || data.is_empty() || data.end > self.size {
                return Err(Error::corrupt(Structure::File, "its data is not in ascending order"));
            }
            self.at = data.start;
            self.data = data;
        }
        // Cut at multiples, so that no extent of the usual alignment is read twice.
        let cut = (self.at / self.part_bytes + 1).saturating_mul(self.part_bytes);
        let part = self.at..self.data.end.min(cut);
        self.at = part.end;
        Ok(Some(part))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_cover_the_data_and_nothing_else() {
        const MIB: u64 = 1 << 20;
        let data = [3 * MIB..5 * MIB, 10 * MIB..50 * MIB, u64::MAX - 5..u64::MAX];
        let mut parts = Parts::new(u64::MAX, PART_BYTES);
        let mut found = Vec::new();
        while let Some(part) =
            parts.next(|at| Ok(data.iter().find(|data| data.end > at).cloned())).unwrap()
        {
            found.push(part);
        }
        assert_eq!(
            found,
            [
                3 * MIB..5 * MIB,
                10 * MIB..16 * MIB,
                16 * MIB..32 * MIB,
                32 * MIB..48 * MIB,
                48 * MIB..50 * MIB,
                u64::MAX - 5..u64::MAX
            ]
        );
    }

    #[test]
    fn data_that_does_not_ascend_ends() {
        let mut parts = Parts::new(100, PART_BYTES);
        assert!(parts.next(|_| Ok(Some(5..5))).is_err());
        assert_eq!(parts.next(|_| Ok(Some(5..9))).unwrap(), Some(5..9));
        assert!(parts.next(|_| Ok(Some(5..9))).is_err());
        assert!(parts.next(|_| Ok(Some(50..101))).is_err());
    }
}
