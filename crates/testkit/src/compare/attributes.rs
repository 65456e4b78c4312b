//! Compares the attributes of one file: what `stat` and `listxattr` return.

use std::ops::ControlFlow;

use offshoot_vfs::{Attr, FileFlags, FileId, FileSystem, FileType, Result};

use super::{Aspect, ComparedPair, ComparisonWalk};

impl ComparisonWalk<'_> {
    /// Compares what `stat` returns. Returns the type if both sides have one.
    pub(super) fn attributes(
        &mut self,
        pair: &ComparedPair,
        is_empty_subvolume: bool,
    ) -> Option<FileType> {
        let (ours, judge) = match (self.ours.attr(pair.ours), self.judge.attr(pair.judge)) {
            (Ok(ours), Ok(judge)) => (ours, judge),
            (ours, judge) => {
                self.same_results(pair, "attributes", ours, judge);
                return None;
            }
        };
        self.same(pair, "type", &ours.file_type, &judge.file_type);
        self.same(pair, "permissions", &ours.permissions, &judge.permissions);
        if !is_empty_subvolume {
            self.stored_attributes(pair, &ours, &judge);
        }
        (ours.file_type == judge.file_type).then_some(judge.file_type)
    }

    fn stored_attributes(&mut self, pair: &ComparedPair, ours: &Attr, judge: &Attr) {
        self.same(pair, "own identity", &ours.file, &pair.ours);
        self.same(pair, "owner", &(ours.uid, ours.gid), &(judge.uid, judge.gid));
        self.same(pair, "device number", &ours.rdev, &judge.rdev);
        if self.compare.includes(Aspect::StoredTimes) {
            self.same(pair, "access time", &ours.atime, &judge.atime);
            if self.compare.includes(Aspect::TimesOfNames) {
                self.same(pair, "change time", &ours.ctime, &judge.ctime);
            }
            self.same(pair, "birth time", &ours.btime, &judge.btime);
        }
        // Only regular files and directories have flags that system calls return.
        let has_flags = matches!(judge.file_type, FileType::Regular | FileType::Directory);
        if has_flags && self.compare.includes(Aspect::Flags) {
            let left_out = if self.compare.includes(Aspect::CompressionFlags) {
                FileFlags::empty()
            } else {
                FileFlags::COMPRESS | FileFlags::NOCOMPRESS
            };
            let flags = (self.ours.flags(pair.ours), self.judge.flags(pair.judge));
            let [ours, judge] = [flags.0, flags.1].map(|flags| flags.map(|flags| flags - left_out));
            self.same_results(pair, "flags", ours, judge);
        }
        let is_dir = judge.file_type == FileType::Directory;
        let has_shape = !is_dir || self.compare.includes(Aspect::DirectoryShape);
        if has_shape
            && self.compare.includes(Aspect::ModificationTimes)
            && (!is_dir || self.compare.includes(Aspect::TimesOfNames))
        {
            self.same(pair, "modification second", &ours.mtime.secs, &judge.mtime.secs);
            if self.compare.includes(Aspect::Nanoseconds) {
                self.same(pair, "modification time", &ours.mtime, &judge.mtime);
            }
        }
        if has_shape {
            self.same(pair, "links", &ours.nlink, &judge.nlink);
        }
        if has_shape && (!is_dir || self.compare.includes(Aspect::DirectorySize)) {
            self.same(pair, "size", &ours.size, &judge.size);
            if self.compare.includes(Aspect::Allocation) {
                self.same(pair, "allocated bytes", &ours.allocated_bytes, &judge.allocated_bytes);
            }
        }
    }

    /// Compares the extended attributes, as a list and one by one.
    pub(super) fn xattrs(&mut self, pair: &ComparedPair) {
        let ours = sorted_xattrs(self.ours, pair.ours);
        let mut judge = sorted_xattrs(self.judge, pair.judge);
        if let Ok(list) = &mut judge
            && !self.compare.includes(Aspect::StoredAcls)
        {
            list.retain(|(name, _)| !name.starts_with(b"trusted.SGI_ACL_"));
        }
        if let Ok(list) = &judge {
            self.outcome.xattrs += list.len() as u64;
            for (name, value) in list {
                let one = self.ours.xattr(pair.ours, name).map_err(|e| e.to_string());
                self.same(
                    pair,
                    &format!("attribute {}", super::show(name)),
                    &one,
                    &Ok(value.clone()),
                );
            }
        }
        self.same_results(pair, "attributes", ours, judge);
    }
}

/// All extended attributes of a file, ordered by name. The volume comes from a test, so nothing
/// limits the size of the list.
///
/// # Errors
/// The error of the filesystem.
pub fn sorted_xattrs(fs: &dyn FileSystem, file: FileId) -> Result<Vec<(Vec<u8>, Vec<u8>)>> {
    let mut list = Vec::new();
    fs.xattrs(file, &mut |name, value| {
        list.push((name.to_vec(), value.to_vec()));
        ControlFlow::Continue(())
    })?;
    list.sort();
    Ok(list)
}
