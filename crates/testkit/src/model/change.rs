//! The calls that change the model.

use std::ops::Range;

use offshoot_vfs::{
    Attr, Dedupe, EntryPlace, Errno, Fallocate, FileFlags, FileId, FilePosition, FileSystemMut,
    FileType, NewFile, NewNode, Parent, Rename, Result, SetAttr, Timestamp, XattrMode,
};

use super::attributes::{FIXED, InheritedAttributes};
use super::contents::{MAX_SIZE, SECTOR, SectorContents};
use super::{
    Model, ModelDirectory, ModelManners, ModelNode, ModelState, NodeBody, ROOT, id, posix,
};

/// The smallest hole that a copy punches into data, in bytes.
const LEAST_PUNCHED: u64 = 64 << 10;

impl ModelState {
    /// `EEXIST` if the name is taken, and other errors if a new name is forbidden.
    pub(super) fn require_free(&self, place: EntryPlace<'_>) -> Result<()> {
        self.directory(place.dir)?;
        if self.node(place.dir)?.attr.nlink == 0 {
            return posix(Errno::NOENT, place.dir);
        }
        self.refuse(place.dir, FileFlags::IMMUTABLE)?;
        if self.lookup(place.dir, place.name).is_ok() {
            return posix(Errno::EXIST, place.name.escape_ascii());
        }
        Ok(())
    }

    pub(super) fn add_entry(
        &mut self,
        place: EntryPlace<'_>,
        file: FileId,
        at: Timestamp,
    ) -> Result<()> {
        let parent = Parent { dir: place.dir, name: place.name.to_vec() };
        if let NodeBody::Directory(directory) = &mut self.node_mut(file)?.body {
            directory.parent = Some(parent);
        }
        let directory = self.directory_mut(place.dir)?;
        directory.last_cookie += 1;
        directory.entries.insert(directory.last_cookie, (place.name.to_vec(), file.ino));
        directory.names.insert(place.name.to_vec(), directory.last_cookie);
        self.touch(place.dir, at)
    }

    pub(super) fn remove_entry(&mut self, place: EntryPlace<'_>, at: Timestamp) -> Result<()> {
        let directory = self.directory_mut(place.dir)?;
        let cookie = directory.names.remove(place.name);
        cookie.and_then(|cookie| directory.entries.remove(&cookie));
        self.touch(place.dir, at)
    }

    pub(super) fn make(
        &mut self,
        place: EntryPlace<'_>,
        body: NodeBody,
        kind: NewNode,
        new: &NewFile,
    ) -> Result<FileId> {
        self.require_writable(place.dir)?;
        self.require_free(place)?;
        let file = self.insert(place.dir, body, kind, new)?;
        self.add_entry(place, file, new.at)?;
        Ok(file)
    }

    /// Makes a new file in `dir`. The caller adds its name.
    fn insert(
        &mut self,
        dir: FileId,
        body: NodeBody,
        kind: NewNode,
        new: &NewFile,
    ) -> Result<FileId> {
        let InheritedAttributes { permissions, flags, xattrs } =
            self.inherited(dir, kind.file_type, new)?;
        let file = id(self.next_ino);
        self.next_ino += 1;
        let size = if let NodeBody::Symlink(target) = &body { target.len() as u64 } else { 0 };
        let attr = Attr {
            file,
            file_type: kind.file_type,
            permissions,
            nlink: 1,
            uid: new.uid,
            gid: new.gid,
            rdev: kind.rdev,
            size,
            allocated_bytes: 0,
            atime: new.at,
            mtime: new.at,
            ctime: new.at,
            btime: new.at,
            generation: 0,
        };
        let subvolume = self.node(dir)?.subvolume;
        let node = ModelNode { attr, subvolume, body, xattrs, flags, opens: 0, is_linkable: false };
        self.nodes.insert(file.ino, node);
        Ok(file)
    }

    /// Removes a name. The file is removed with its last name unless it is open.
    fn take_away(
        &mut self,
        place: EntryPlace<'_>,
        is_directory: bool,
        at: Timestamp,
    ) -> Result<()> {
        self.require_writable(place.dir)?;
        let file = self.lookup(place.dir, place.name)?;
        self.refuse(place.dir, FIXED)?;
        self.refuse(file, FIXED)?;
        if file.ino == self.default {
            return posix(Errno::PERM, file);
        }
        match (is_directory, &self.node(file)?.body) {
            (true, NodeBody::Directory(inner)) if !inner.names.is_empty() => {
                return posix(Errno::NOTEMPTY, file);
            }
            (true, NodeBody::Directory(_)) => {}
            (true, _) => return posix(Errno::NOTDIR, file),
            (false, NodeBody::Directory(_)) => return posix(Errno::ISDIR, file),
            (false, _) => {}
        }
        self.remove_entry(place, at)?;
        let node = self.node_mut(file)?;
        node.attr.nlink -= 1;
        node.attr.ctime = at;
        if node.attr.nlink == 0 && node.opens == 0 {
            self.nodes.remove(&file.ino);
            self.read_only.remove(&file.ino);
        }
        Ok(())
    }

    /// Exchanges the names of two files.
    fn exchange(
        &mut self,
        places: [EntryPlace<'_>; 2],
        files: [FileId; 2],
        at: Timestamp,
    ) -> Result<()> {
        let ([from, to], [moved, other]) = (places, files);
        if moved == other {
            return Ok(());
        }
        let ways = [(moved, to.dir), (other, from.dir)];
        // Linux checks the ancestors of both before it asks the filesystem about either one.
        for (file, dir) in ways {
            if self.file_type(file)? == FileType::Directory && self.is_below(dir, file)? {
                return posix(Errno::INVAL, file);
            }
        }
        for (file, dir) in ways {
            self.refuse(file, FIXED)?;
            self.refuse(dir, FIXED)?;
            if from.dir != to.dir {
                self.require_writable(file)?;
            }
        }
        self.remove_entry(from, at)?;
        self.remove_entry(to, at)?;
        for (place, file) in [(to, moved), (from, other)] {
            self.add_entry(place, file, at)?;
            if self.manners == ModelManners::Btrfs {
                self.moved(file, at)?;
            }
        }
        if self.manners == ModelManners::Xfs && from.dir != to.dir {
            self.exchanged([moved, other], at)?;
        }
        Ok(())
    }

    /// Updates the times of two files that changed places between directories, as XFS does: only a
    /// directory, whose `..` changes, and the file that changed places with it.
    fn exchanged(&mut self, files: [FileId; 2], at: Timestamp) -> Result<()> {
        for (file, other) in [(files[0], files[1]), (files[1], files[0])] {
            if self.file_type(file)? == FileType::Directory {
                self.node_mut(file)?.attr.mtime = at;
                self.moved(file, at)?;
                self.moved(other, at)?;
            }
        }
        Ok(())
    }

    /// Updates the ctime of a file that was moved. A subvolume does not store its own path, so its
    /// ctime stays.
    fn moved(&mut self, file: FileId, at: Timestamp) -> Result<()> {
        if !self.is_subvolume(file) {
            self.node_mut(file)?.attr.ctime = at;
        }
        Ok(())
    }

    fn is_below(&self, mut dir: FileId, above: FileId) -> Result<bool> {
        while dir.ino != ROOT {
            if dir == above {
                return Ok(true);
            }
            match &self.directory(dir)?.parent {
                Some(parent) => dir = parent.dir,
                None => break,
            }
        }
        Ok(false)
    }
}

impl ModelState {
    fn sizes(&self, one: FileId, other: FileId) -> Result<[u64; 2]> {
        let size = |file| self.contents(file).and_then(|_| Ok(self.node(file)?.attr.size));
        Ok([size(one)?, size(other)?])
    }

    fn bytes(&self, from: FilePosition, len: u64) -> Result<Vec<u8>> {
        let mut bytes = vec![0; usize::try_from(len).expect("ranges of the model are small")];
        self.contents(from.file)?.read(from.offset, &mut bytes);
        Ok(bytes)
    }

    /// Replaces sectors by a copy of others. The last one may be partial.
    fn clone_sectors(&mut self, from: FilePosition, to: FilePosition, len: u64) -> Result<()> {
        let contents = self.contents(from.file)?;
        let sectors = contents.moved(from.offset..from.offset + len, to.offset);
        self.contents_mut(to.file)?.replace(to.offset..to.offset + len, sectors);
        Ok(())
    }

    /// Makes the part of a sector at the end of a file data, before a clone to `offset` that lies
    /// behind the end.
    fn store_end(&mut self, file: FileId, offset: u64) -> Result<()> {
        let [size, _] = self.sizes(file, file)?;
        if size < offset && !size.is_multiple_of(SECTOR) {
            self.contents_mut(file)?.write(size, &[0]);
        }
        Ok(())
    }

    /// Copies `range`, which counts from both positions. Holes are punched where the destination
    /// has data. Instead of small ones, its data becomes zeros.
    fn copy_bytes(
        &mut self,
        from: FilePosition,
        to: FilePosition,
        range: Range<u64>,
        at: Timestamp,
    ) -> Result<()> {
        let (mut source, mut target) = (0..0, 0..0);
        let mut done = range.start;
        while done < range.end {
            self.find_data(from, done, &mut source)?;
            let start = (source.start.max(from.offset + done) - from.offset).min(range.end);
            if done < start {
                self.find_data(to, done, &mut target)?;
                if target.start.max(to.offset + done) < to.offset + start {
                    let [size, _] = self.sizes(to.file, to.file)?;
                    let hole = to.offset + done..to.offset + start;
                    let contents = self.contents_mut(to.file)?;
                    if start - done < LEAST_PUNCHED {
                        contents.zero(hole);
                    } else if hole.end < size {
                        contents.punch(hole);
                    } else {
                        contents.punch(hole.start..size.next_multiple_of(SECTOR));
                    }
                }
            }
            let end = (source.end - from.offset).min(range.end).max(start);
            if start < end {
                let position = FilePosition { offset: from.offset + start, ..from };
                let bytes = self.bytes(position, end - start)?;
                self.contents_mut(to.file)?.write(to.offset + start, &bytes);
                self.written(to.file, to.offset + end, at)?;
            }
            done = end;
        }
        Ok(())
    }

    /// Replaces `run`, if it ends before `at` behind the position, by the next run of data there.
    fn find_data(&self, position: FilePosition, at: u64, run: &mut Range<u64>) -> Result<()> {
        let offset = position.offset + at;
        if run.end <= offset {
            let [size, _] = self.sizes(position.file, position.file)?;
            let next = self.contents(position.file)?.next_data(offset, size);
            *run = next.unwrap_or(u64::MAX..u64::MAX);
        }
        Ok(())
    }

    /// Updates the size and the times of a file that was written up to `end`.
    fn written(&mut self, file: FileId, end: u64, at: Timestamp) -> Result<()> {
        let attr = &mut self.node_mut(file)?.attr;
        (attr.size, attr.mtime, attr.ctime) = (attr.size.max(end), at, at);
        Ok(())
    }
}

impl ModelState {
    /// `EINVAL` unless two ranges consist of whole blocks and do not overlap. With `may_be_cut` the
    /// last block may be partial.
    fn require_blocks(
        &self,
        from: FilePosition,
        to: FilePosition,
        len: u64,
        may_be_cut: bool,
    ) -> Result<()> {
        let is_whole = |at: u64| at.is_multiple_of(self.block_bytes);
        let are_whole = is_whole(from.offset) && is_whole(to.offset);
        let whole_len = len.next_multiple_of(self.block_bytes);
        let overlap = from.file == to.file && from.offset.abs_diff(to.offset) < whole_len;
        if !are_whole || !(is_whole(len) || may_be_cut) || overlap {
            return posix(Errno::INVAL, to.file);
        }
        Ok(())
    }
}

impl Model {
    /// Makes the part of a sector at the end of a file data, before a clone behind the end, where
    /// the filesystem does that.
    fn store_end_for_clone(state: &mut ModelState, to: FilePosition) -> Result<()> {
        match state.manners {
            ModelManners::Btrfs => state.store_end(to.file, to.offset),
            ModelManners::Xfs => Ok(()),
        }
    }
}

impl FileSystemMut for Model {
    fn mknod(&self, place: EntryPlace<'_>, kind: NewNode, new: &NewFile) -> Result<FileId> {
        let body = match kind.file_type {
            FileType::Regular => NodeBody::Regular(SectorContents::default()),
            _ => NodeBody::Other,
        };
        self.state().make(place, body, kind, new)
    }

    fn mkdir(&self, place: EntryPlace<'_>, new: &NewFile) -> Result<FileId> {
        let kind = NewNode { file_type: FileType::Directory, rdev: (0, 0) };
        self.state().make(place, NodeBody::Directory(ModelDirectory::default()), kind, new)
    }

    fn symlink(&self, place: EntryPlace<'_>, target: &[u8], new: &NewFile) -> Result<FileId> {
        let kind = NewNode { file_type: FileType::Symlink, rdev: (0, 0) };
        self.state().make(place, NodeBody::Symlink(target.to_vec()), kind, new)
    }

    fn create_unnamed(&self, dir: FileId, is_linkable: bool, new: &NewFile) -> Result<FileId> {
        let mut state = self.state();
        state.require_writable(dir)?;
        state.directory(dir)?;
        if state.node(dir)?.attr.nlink == 0 {
            return posix(Errno::NOENT, dir);
        }
        state.refuse(dir, FileFlags::IMMUTABLE)?;
        let kind = NewNode { file_type: FileType::Regular, rdev: (0, 0) };
        let file = state.insert(dir, NodeBody::Regular(SectorContents::default()), kind, new)?;
        let node = state.node_mut(file)?;
        (node.attr.nlink, node.opens, node.is_linkable) = (0, 1, is_linkable);
        Ok(file)
    }

    fn link(&self, file: FileId, place: EntryPlace<'_>, at: Timestamp) -> Result<()> {
        let mut state = self.state();
        state.require_writable(place.dir)?;
        let attr = state.node(file)?.attr;
        state.require_same_subvolume(file, place.dir)?;
        state.require_free(place)?;
        if attr.file_type == FileType::Directory {
            return posix(Errno::PERM, file);
        }
        if attr.nlink == 0 && !state.node(file)?.is_linkable {
            return posix(Errno::NOENT, file);
        }
        state.refuse(file, FIXED)?;
        state.add_entry(place, file, at)?;
        let node = state.node_mut(file)?;
        node.attr.nlink += 1;
        node.attr.ctime = at;
        node.is_linkable = false;
        Ok(())
    }

    fn unlink(&self, place: EntryPlace<'_>, at: Timestamp) -> Result<()> {
        self.state().take_away(place, false, at)
    }

    fn rmdir(&self, place: EntryPlace<'_>, at: Timestamp) -> Result<()> {
        self.state().take_away(place, true, at)
    }

    fn rename_with(
        &self,
        from: EntryPlace<'_>,
        to: EntryPlace<'_>,
        how: Rename,
        at: Timestamp,
    ) -> Result<()> {
        let mut state = self.state();
        state.require_writable(from.dir)?;
        state.require_writable(to.dir)?;
        let moved = state.lookup(from.dir, from.name)?;
        let is_directory = state.file_type(moved)? == FileType::Directory;
        let replaced = state.lookup(to.dir, to.name);
        if replaced.is_err() {
            state.directory(to.dir)?;
        }
        match (how, &replaced) {
            (Rename::NoReplace | Rename::Whiteout { replaces: false, .. }, Ok(_)) => {
                return posix(Errno::EXIST, to.name.escape_ascii());
            }
            (Rename::Exchange, Err(_)) => return posix(Errno::NOENT, to.name.escape_ascii()),
            _ => {}
        }
        let other = replaced.as_ref().ok().filter(|_| how == Rename::Exchange).copied();
        if ![Some(moved), other].into_iter().flatten().all(|file| state.is_subvolume(file)) {
            state.require_same_subvolume(from.dir, to.dir)?;
        }
        if let Some(other) = other {
            return state.exchange([from, to], [moved, other], at);
        }
        if replaced.as_ref().is_ok_and(|file| *file == moved) {
            return Ok(());
        }
        if is_directory && state.is_below(to.dir, moved)? {
            return posix(Errno::INVAL, moved);
        }
        if let (ModelManners::Xfs, Ok(replaced)) = (state.manners, &replaced)
            && state.file_type(*replaced)? == FileType::Directory
            && state.is_below(from.dir, *replaced)?
        {
            return posix(Errno::NOTEMPTY, replaced);
        }
        state.refuse(from.dir, FIXED)?;
        state.refuse(to.dir, FileFlags::IMMUTABLE)?;
        state.refuse(moved, FIXED)?;
        if from.dir != to.dir {
            // Moving a directory changes an entry in it: `..`.
            state.require_writable(moved)?;
        }
        if state.node(to.dir)?.attr.nlink == 0 {
            return posix(Errno::NOENT, to.dir);
        }
        if let Ok(replaced) = replaced {
            if is_directory && state.is_subvolume(replaced) {
                return posix(Errno::NOTEMPTY, replaced);
            }
            state.take_away(to, is_directory, at).or_else(|error| {
                match (state.manners, error.errno()) {
                    (ModelManners::Xfs, Errno::NOTEMPTY) => posix(Errno::EXIST, replaced),
                    _ => Err(error),
                }
            })?;
        }
        state.remove_entry(from, at)?;
        state.add_entry(to, moved, at)?;
        state.moved(moved, at)?;
        if let Some(new) = how.whiteout() {
            let node = NewNode { file_type: FileType::CharDevice, rdev: (0, 0) };
            state.make(from, NodeBody::Other, node, &new)?;
        }
        Ok(())
    }

    fn set_attr(&self, file: FileId, set: &SetAttr, at: Timestamp) -> Result<()> {
        let mut state = self.state();
        state.require_writable(file)?;
        let is_touch = *set == SetAttr::TOUCH;
        state.refuse(file, if is_touch { FileFlags::IMMUTABLE } else { FIXED })?;
        if set.permissions.is_some() && state.file_type(file)? == FileType::Symlink {
            return posix(Errno::OPNOTSUPP, file);
        }
        if let Some(size) = set.size {
            let contents = state.contents_mut(file)?;
            if size > MAX_SIZE {
                return posix(Errno::FBIG, file);
            }
            contents.cut(size);
            let attr = &mut state.node_mut(file)?.attr;
            (attr.size, attr.mtime) = (size, at);
        }
        if let Some(permissions) = set.permissions {
            state.set_permissions(file, permissions)?;
        }
        let attr = &mut state.node_mut(file)?.attr;
        attr.uid = set.uid.unwrap_or(attr.uid);
        attr.gid = set.gid.unwrap_or(attr.gid);
        attr.atime = set.atime.map_or(attr.atime, |time| time.at(at));
        attr.mtime = set.mtime.map_or(attr.mtime, |time| time.at(at));
        attr.ctime = at;
        Ok(())
    }

    fn set_flags(&self, file: FileId, flags: FileFlags, at: Timestamp) -> Result<()> {
        self.state().set_flags(file, flags, at)
    }

    fn write(&self, file: FileId, offset: u64, data: &[u8], at: Timestamp) -> Result<()> {
        let mut state = self.state();
        state.require_writable(file)?;
        let [size, _] = state.sizes(file, file)?;
        state.refuse(file, if offset == size { FileFlags::IMMUTABLE } else { FIXED })?;
        let end = offset.checked_add(data.len() as u64).filter(|&end| end <= MAX_SIZE);
        let Some(end) = end else { return posix(Errno::FBIG, file) };
        if data.is_empty() {
            return Ok(());
        }
        state.contents_mut(file)?.write(offset, data);
        state.written(file, end, at)
    }

    fn write_direct(&self, file: FileId, offset: u64, data: &[u8], at: Timestamp) -> Result<()> {
        self.write(file, offset, data, at)
    }

    fn fallocate(
        &self,
        file: FileId,
        what: Fallocate,
        offset: u64,
        len: u64,
        at: Timestamp,
    ) -> Result<()> {
        let mut state = self.state();
        state.require_writable(file)?;
        let [size, _] = state.sizes(file, file)?;
        let is_allocation = matches!(what, Fallocate::Allocate { .. });
        state.refuse(file, if is_allocation { FileFlags::IMMUTABLE } else { FIXED })?;
        if len == 0 {
            return posix(Errno::INVAL, file);
        }
        let end = offset.checked_add(len).filter(|&end| end <= MAX_SIZE);
        let Some(end) = end else { return posix(Errno::FBIG, file) };
        let block = state.block_bytes;
        let is_whole = offset.is_multiple_of(block) && len.is_multiple_of(block);
        let new_size = match what {
            Fallocate::Allocate { keeps_size: false } | Fallocate::Zero { keeps_size: false } => {
                size.max(end)
            }
            Fallocate::Collapse if !is_whole || end >= size => return posix(Errno::INVAL, file),
            Fallocate::Insert if !is_whole || offset >= size => return posix(Errno::INVAL, file),
            Fallocate::Insert if size > MAX_SIZE - len => return posix(Errno::FBIG, file),
            Fallocate::Collapse => size - len,
            Fallocate::Insert => size + len,
            _ => size,
        };
        let contents = state.contents_mut(file)?;
        match what {
            Fallocate::Allocate { .. } => contents.preallocate(offset..end),
            Fallocate::PunchHole => contents.punch(offset..end),
            Fallocate::Zero { .. } => {
                contents.punch(offset..end);
                contents.preallocate(offset..end);
            }
            Fallocate::Collapse => contents.shift(end, offset),
            Fallocate::Insert => contents.shift(offset, end),
        }
        let attr = &mut state.node_mut(file)?.attr;
        (attr.size, attr.mtime, attr.ctime) = (new_size, at, at);
        Ok(())
    }

    fn clone_range(
        &self,
        from: FilePosition,
        to: FilePosition,
        len: u64,
        at: Timestamp,
    ) -> Result<()> {
        let mut state = self.state();
        state.require_writable(to.file)?;
        let [from_size, to_size] = state.sizes(from.file, to.file)?;
        state.refuse(to.file, FIXED)?;
        let rest = from_size.checked_sub(from.offset).filter(|&rest| len <= rest);
        let Some(rest) = rest else { return posix(Errno::INVAL, from.file) };
        let len = if len == 0 { rest } else { len };
        let end = to.offset.checked_add(len).filter(|&end| end <= MAX_SIZE);
        let Some(end) = end else { return posix(Errno::FBIG, to.file) };
        state.require_alike(from.file, to.file)?;
        if len > 0 {
            state.require_blocks(from, to, len, len == rest && end >= to_size)?;
            Self::store_end_for_clone(&mut state, to)?;
            state.clone_sectors(from, to, len)?;
            state.written(to.file, end, at)?;
        }
        Ok(())
    }

    fn dedupe_range(&self, from: FilePosition, to: FilePosition, len: u64) -> Result<Dedupe> {
        let mut state = self.state();
        let [from_size, to_size] = state.sizes(from.file, to.file)?;
        state.refuse(to.file, FileFlags::IMMUTABLE)?;
        state.require_alike(from.file, to.file)?;
        if len == 0 {
            return Ok(Dedupe::Same { len });
        }
        let block = state.block_bytes;
        let rests = [(from_size, from), (to_size, to)]
            .map(|(size, at)| size.checked_sub(at.offset).filter(|&rest| len <= rest));
        if rests.contains(&None) {
            return posix(Errno::INVAL, to.file);
        }
        let len = if rests == [Some(len); 2] { len } else { len / block * block };
        state.require_blocks(from, to, len, true)?;
        if state.bytes(from, len)? != state.bytes(to, len)? {
            return Ok(Dedupe::Differs);
        }
        // Written zeros and a hole are equal, and the destination becomes what the source is. What
        // is smaller than a sector is equal in any case.
        if block >= SECTOR {
            state.clone_sectors(from, to, len)?;
        }
        Ok(Dedupe::Same { len })
    }

    fn copy_range(
        &self,
        from: FilePosition,
        to: FilePosition,
        len: u64,
        at: Timestamp,
    ) -> Result<u64> {
        let mut state = self.state();
        state.require_writable(to.file)?;
        let [from_size, to_size] = state.sizes(from.file, to.file)?;
        state.refuse(to.file, FIXED)?;
        let rest = from_size.saturating_sub(from.offset);
        let len = len.min(rest);
        let end = to.offset.checked_add(len).filter(|&end| end <= MAX_SIZE);
        let Some(end) = end else { return posix(Errno::FBIG, to.file) };
        if from.file == to.file && from.offset.abs_diff(to.offset) < len {
            return posix(Errno::INVAL, to.file);
        }
        if len == 0 {
            return Ok(0);
        }
        // Whole sectors keep their holes if both ranges are aligned alike.
        let head = from.offset.next_multiple_of(SECTOR) - from.offset;
        let is_whole = len == rest && end >= to_size;
        let tail = if is_whole { 0 } else { (from.offset + len) % SECTOR };
        let lie_alike = from.offset % SECTOR == to.offset % SECTOR
            && head + tail < len
            && state.require_alike(from.file, to.file).is_ok();
        let whole = if lie_alike { head..len - tail } else { len..len };
        if lie_alike && head == 0 {
            Self::store_end_for_clone(&mut state, to)?;
        }
        for part in [0..whole.start, whole.end..len] {
            state.copy_bytes(from, to, part, at)?;
        }
        if !whole.is_empty() {
            let place = |position: FilePosition| FilePosition {
                offset: position.offset + whole.start,
                ..position
            };
            state.clone_sectors(place(from), place(to), whole.end - whole.start)?;
        }
        state.written(to.file, end, at)?;
        Ok(len)
    }

    fn set_xattr(
        &self,
        file: FileId,
        name: &[u8],
        value: &[u8],
        mode: XattrMode,
        at: Timestamp,
    ) -> Result<()> {
        self.state().set_xattr(file, name, value, mode, at)
    }

    fn remove_xattr(&self, file: FileId, name: &[u8], at: Timestamp) -> Result<()> {
        self.state().remove_xattr(file, name, at)
    }

    fn open(&self, file: FileId) -> Result<()> {
        self.state().node_mut(file)?.opens += 1;
        Ok(())
    }

    fn release(&self, file: FileId) -> Result<()> {
        let mut state = self.state();
        let node = state.node_mut(file)?;
        let Some(left) = node.opens.checked_sub(1) else { return posix(Errno::BADF, file) };
        node.opens = left;
        if left == 0 && node.attr.nlink == 0 {
            state.nodes.remove(&file.ino);
        }
        Ok(())
    }

    fn fsync(&self, _file: FileId) -> Result<()> {
        Ok(())
    }

    fn sync(&self) -> Result<()> {
        Ok(())
    }
}
