//! Files that an older root of a volume shows, and the volume as it is now does not.
//!
//! Such a file is known by its subvolume, its inode number and the generation in which it was made.
//! A file that was only renamed or changed is still there. What a search finds is bounded by
//! [`MOST_FILES`].

use std::collections::HashSet;
use std::ops::ControlFlow;
use std::sync::Arc;

use offshoot_btrfs_format::{ItemType, Key, Logical, TreeId};
use offshoot_vfs::walk::{DEPTH_MAX, WalkVisitor, WalkedFile, walk};
use offshoot_vfs::{
    Attr, DirEntry, Errno, Error, FileFlags, FileId, FileSystem, Parent, Result, StatFs,
};

use super::{BtrfsVolume, Filesystem};
use crate::inode;
use crate::tree::Cursor;

/// The most files that are kept of one root, and of all roots together.
const MOST_FILES: usize = 1 << 20;

/// A search for deleted files, through one root after the other, the newest first.
pub struct DeletedSearch {
    present: Arc<BtrfsVolume>,
    /// The trees that were looked through, by the address and generation of their roots.
    seen_trees: HashSet<(TreeId, Logical, u64)>,
    /// The files that were found: subvolume, inode, and generation.
    found: HashSet<(FileId, u64)>,
}

impl DeletedSearch {
    /// A search for what `present` does not show.
    ///
    /// # Errors
    /// When its root tree cannot be read.
    pub fn new(present: Arc<BtrfsVolume>) -> Result<Self> {
        let mut search = Self { present, seen_trees: HashSet::new(), found: HashSet::new() };
        let present = search.present.clone();
        search.note_trees(&present)?;
        Ok(search)
    }

    /// Remembers the trees of the subvolumes of `volume`. Returns whether some are new.
    fn note_trees(&mut self, volume: &BtrfsVolume) -> Result<bool> {
        let mut are_new = false;
        let first = Key::new(TreeId::FS.0, ItemType::ROOT_ITEM, 0);
        let mut cursor = Cursor::seek(&volume.rooms, volume.root_tree(), first)?;
        let mut trees = Vec::new();
        while let Some((key, _)) = cursor.item() {
            let id = TreeId(key.objectid);
            if id > TreeId::LAST_FREE {
                break;
            }
            if key.item_type == ItemType::ROOT_ITEM && id.is_subvolume() {
                trees.push(id);
            }
            cursor.advance()?;
        }
        for id in trees {
            // One that is being dropped is not shown.
            if let Ok(root) = volume.tree(id) {
                are_new |= self.seen_trees.insert((id, root.logical, root.generation.0));
            }
        }
        Ok(are_new)
    }

    /// The files that `older` shows, which is the same volume through an older root, and that
    /// neither the volume shows nor a root before. `is_wanted` gets their paths. `None` when there
    /// are none.
    ///
    /// # Errors
    /// When the root tree of `older` cannot be read.
    pub fn in_root(
        &mut self,
        older: &Arc<BtrfsVolume>,
        is_wanted: &dyn Fn(&[u8]) -> bool,
    ) -> Result<Option<Arc<DeletedFiles>>> {
        if !self.note_trees(older)? {
            return Ok(None);
        }
        let fs = Filesystem::new(older.clone(), TreeId::FS);
        let mut walked =
            DeletedWalk { search: self, is_wanted, shown: HashSet::new(), above: Vec::new() };
        walk(&fs, fs.root(), (), DEPTH_MAX, &mut walked);
        let (shown, above) = (walked.shown, walked.above);
        if shown.is_empty() {
            return Ok(None);
        }
        let mut directories = HashSet::from([fs.root()]);
        for mut dir in above {
            while directories.insert(dir) {
                // The walk came through it, so it has a parent unless it is the root.
                let Ok(Some(parent)) = fs.parent(dir) else { break };
                dir = parent.dir;
            }
        }
        Ok(Some(Arc::new(DeletedFiles { fs, shown, directories })))
    }

    /// Whether the volume as it is now has this file.
    fn is_present(&self, attr: &Attr) -> bool {
        let now = inode::attr(&self.present, attr.file);
        now.is_ok_and(|now| now.generation == attr.generation)
    }
}

/// The visitor that finds deleted files.
struct DeletedWalk<'s> {
    search: &'s mut DeletedSearch,
    is_wanted: &'s dyn Fn(&[u8]) -> bool,
    shown: HashSet<FileId>,
    /// The directories of the shown files.
    above: Vec<FileId>,
}

impl WalkVisitor for DeletedWalk<'_> {
    type Directory = ();

    fn enter(&mut self, (): &(), _: &WalkedFile<'_>) -> Option<()> {
        Some(())
    }

    fn visit(&mut self, (): &(), entry: &WalkedFile<'_>) {
        let attr = entry.attr;
        if (self.is_wanted)(entry.path)
            && !self.search.is_present(attr)
            && self.search.found.len() < MOST_FILES
        {
            let is_new = self.search.found.insert((attr.file, attr.generation));
            // Each name of a file is shown.
            if is_new {
                self.shown.insert(attr.file);
            }
            if self.shown.contains(&attr.file) && self.above.last() != Some(&entry.parent) {
                self.above.push(entry.parent);
            }
        }
    }

    /// What cannot be read through an older root was overwritten since.
    fn failed(&mut self, _: &[u8], _: &Error) {}

    fn is_stopped(&self) -> bool {
        false
    }
}

/// The deleted files that one root shows, in their directories.
pub struct DeletedFiles {
    fs: Filesystem,
    shown: HashSet<FileId>,
    directories: HashSet<FileId>,
}

impl DeletedFiles {
    /// How many there are.
    #[must_use]
    pub fn count(&self) -> usize {
        self.shown.len()
    }

    fn shows(&self, file: FileId) -> bool {
        self.shown.contains(&file) || self.directories.contains(&file)
    }
}

impl FileSystem for DeletedFiles {
    fn root(&self) -> FileId {
        self.fs.root()
    }

    fn reuses_numbers(&self) -> bool {
        false
    }

    fn statfs(&self) -> Result<StatFs> {
        self.fs.statfs()
    }

    fn lookup(&self, dir: FileId, name: &[u8]) -> Result<FileId> {
        let found = self.fs.lookup(dir, name)?;
        if self.shows(found) {
            return Ok(found);
        }
        Err(Error::posix(Errno::NOENT, format!("`{}` in {dir}", name.escape_ascii())))
    }

    fn parent(&self, dir: FileId) -> Result<Option<Parent>> {
        self.fs.parent(dir)
    }

    fn attr(&self, file: FileId) -> Result<Attr> {
        self.fs.attr(file)
    }

    fn flags(&self, file: FileId) -> Result<FileFlags> {
        self.fs.flags(file)
    }

    fn read_dir(
        &self,
        dir: FileId,
        after: u64,
        visit: &mut dyn FnMut(DirEntry<'_>) -> ControlFlow<()>,
    ) -> Result<()> {
        self.fs.read_dir(dir, after, &mut |entry| {
            if self.shows(entry.file) { visit(entry) } else { ControlFlow::Continue(()) }
        })
    }

    offshoot_vfs::forward_contents!(fs);

    fn xattrs(
        &self,
        file: FileId,
        visit: &mut dyn FnMut(&[u8], &[u8]) -> ControlFlow<()>,
    ) -> Result<()> {
        self.fs.xattrs(file, visit)
    }
}
