//! A tree of names in memory, with what each change does to it, and what it is refused for.

use std::ffi::OsStr;
use std::os::unix::fs::FileTypeExt;

use super::*;

/// A file of the model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct TreeNode {
    pub(super) file_type: FileType,
    pub(super) permissions: u32,
    pub(super) owner: (u32, u32),
    pub(super) rdev: (u32, u32),
    pub(super) links: u32,
    pub(super) target: Vec<u8>,
    pub(super) names: BTreeMap<Vec<u8>, Ino>,
    /// Of a directory, the one above it.
    pub(super) parent: Option<Ino>,
    pub(super) mtime: i64,
    pub(super) ctime: i64,
}

impl TreeNode {
    pub(super) fn new(kind: XfsNewKind<'_>, new: &NewFile) -> Self {
        let (rdev, target) = match kind {
            XfsNewKind::Node(_, rdev) => (rdev, Vec::new()),
            XfsNewKind::Symlink(target) => ((0, 0), target.to_vec()),
            _ => ((0, 0), Vec::new()),
        };
        let is_link = matches!(kind, XfsNewKind::Symlink(_));
        Self {
            file_type: kind.file_type(),
            permissions: if is_link { 0o777 } else { new.permissions },
            owner: (new.uid, new.gid),
            rdev,
            links: kind.links(),
            target,
            names: BTreeMap::new(),
            parent: None,
            mtime: new.at.secs,
            ctime: new.at.secs,
        }
    }

    fn of(attr: &Attr) -> Self {
        Self {
            file_type: attr.file_type,
            permissions: attr.permissions,
            owner: (attr.uid, attr.gid),
            rdev: attr.rdev,
            links: attr.nlink,
            target: Vec::new(),
            names: BTreeMap::new(),
            parent: None,
            mtime: attr.mtime.secs,
            ctime: attr.ctime.secs,
        }
    }

    pub(super) fn is_directory(&self) -> bool {
        self.file_type == FileType::Directory
    }
}

/// A tree of names.
#[derive(Clone, Debug)]
pub(super) struct NameTree {
    pub(super) nodes: BTreeMap<Ino, TreeNode>,
    root: Ino,
    /// The file that the last change has taken its last name from.
    pub(super) lost: Option<(Ino, TreeNode)>,
    /// Whether the last change has left a whiteout, whose number only the volume knows.
    pub(super) wants_whiteout: Option<()>,
}

impl PartialEq for NameTree {
    fn eq(&self, other: &Self) -> bool {
        self.nodes == other.nodes
    }
}

impl NameTree {
    /// What a reader finds.
    pub(super) fn read(fs: &dyn FileSystem) -> Self {
        let root = Ino(fs.root().ino);
        let mut tree = Self { nodes: BTreeMap::new(), root, lost: None, wants_whiteout: None };
        tree.read_node(fs, root, None);
        tree
    }

    fn read_node(&mut self, fs: &dyn FileSystem, ino: Ino, parent: Option<Ino>) {
        let file = file_id(ino);
        let mut node = TreeNode::of(&fs.attr(file).unwrap());
        match node.file_type {
            FileType::Symlink => node.target = fs.read_link(file).unwrap(),
            FileType::Directory => node.parent = parent,
            _ => {}
        }
        let mut below = Vec::new();
        if node.is_directory() {
            let mut visit = |entry: offshoot_vfs::DirEntry<'_>| {
                let ino = Ino(entry.file.ino);
                below.push((ino, entry.file_type));
                assert!(node.names.insert(entry.name.to_vec(), ino).is_none());
                ControlFlow::Continue(())
            };
            fs.read_dir(file, 0, &mut visit).unwrap();
            let above = fs.parent(file).unwrap().map(|above| Ino(above.dir.ino));
            assert!(above.is_none() || above == parent, "{above:?} {parent:?}");
        }
        let before = self.nodes.insert(ino, node);
        assert!(before.is_none_or(|before| !before.is_directory()), "{ino} has two names");
        for (below, file_type) in below {
            if !self.nodes.contains_key(&below) {
                self.read_node(fs, below, Some(ino));
            }
            assert_eq!(self.nodes[&below].file_type, file_type);
        }
    }

    /// The part of the tree from a directory on.
    pub(super) fn below(&self, root: Ino) -> Self {
        let mut nodes = BTreeMap::new();
        let mut left = vec![root];
        while let Some(ino) = left.pop() {
            let node = self.nodes[&ino].clone();
            left.extend(node.names.values());
            nodes.insert(ino, node);
        }
        nodes.get_mut(&root).unwrap().parent = None;
        Self { nodes, root, lost: None, wants_whiteout: None }
    }

    pub(super) fn directories(&self) -> Vec<Ino> {
        let is_directory = |(ino, node): (&Ino, &TreeNode)| node.is_directory().then_some(*ino);
        self.nodes.iter().filter_map(is_directory).collect()
    }

    pub(super) fn all(&self) -> Vec<Ino> {
        self.nodes.keys().copied().collect()
    }

    fn node(&mut self, ino: Ino) -> &mut TreeNode {
        self.nodes.get_mut(&ino).unwrap()
    }

    fn find(&self, dir: Ino, name: &[u8]) -> Option<Ino> {
        self.nodes[&dir].names.get(name).copied()
    }

    fn require(&self, dir: Ino, name: &[u8]) -> Result<Ino, Errno> {
        self.find(dir, name).ok_or(Errno::NOENT)
    }

    pub(super) fn may_add(&self, dir: Ino, name: &[u8]) -> Result<(), Errno> {
        if self.find(dir, name).is_some() { Err(Errno::EXIST) } else { Ok(()) }
    }

    pub(super) fn may_remove(&self, dir: Ino, name: &[u8], is_rmdir: bool) -> Result<(), Errno> {
        let node = &self.nodes[&self.require(dir, name)?];
        match (node.is_directory(), is_rmdir) {
            (true, false) => Err(Errno::ISDIR),
            (false, true) => Err(Errno::NOTDIR),
            (true, true) if !node.names.is_empty() => Err(Errno::NOTEMPTY),
            _ => Ok(()),
        }
    }

    /// Whether `dir` is `above`, or below it.
    fn is_below(&self, dir: Ino, above: Ino) -> bool {
        let mut at = Some(dir);
        while let Some(ino) = at {
            if ino == above {
                return true;
            }
            at = self.nodes[&ino].parent;
        }
        false
    }

    pub(super) fn may_rename(
        &self,
        from: NamePlace<'_>,
        to: NamePlace<'_>,
        how: Rename,
    ) -> Result<(), Errno> {
        let source = self.require(from.dir, from.name)?;
        let target = self.find(to.dir, to.name);
        let is_exchange = how == Rename::Exchange;
        let Some(target) = target else {
            if is_exchange {
                return Err(Errno::NOENT);
            }
            let is_below = self.nodes[&source].is_directory() && self.is_below(to.dir, source);
            return if is_below { Err(Errno::INVAL) } else { Ok(()) };
        };
        if !is_exchange && !how.replaces() {
            return Err(Errno::EXIST);
        }
        if source == target {
            return Ok(());
        }
        let (old, new) = (&self.nodes[&source], &self.nodes[&target]);
        let differ = from.dir != to.dir;
        if differ && old.is_directory() && self.is_below(to.dir, source) {
            return Err(Errno::INVAL);
        }
        let is_above = differ && new.is_directory() && self.is_below(from.dir, target);
        match (old.is_directory(), new.is_directory()) {
            _ if is_exchange => {
                if is_above {
                    Err(Errno::INVAL)
                } else {
                    Ok(())
                }
            }
            _ if is_above => Err(Errno::NOTEMPTY),
            (true, false) => Err(Errno::NOTDIR),
            (false, true) => Err(Errno::ISDIR),
            (true, true) if !new.names.is_empty() => Err(Errno::EXIST),
            _ => Ok(()),
        }
    }

    pub(super) fn touch(&mut self, dir: Ino, at: i64) {
        let node = self.node(dir);
        (node.mtime, node.ctime) = (at, at);
    }

    pub(super) fn create(&mut self, (dir, name): (Ino, &[u8]), ino: Ino, node: TreeNode) {
        let at = node.ctime;
        let is_directory = node.is_directory();
        let parent = is_directory.then_some(dir);
        assert!(self.nodes.insert(ino, TreeNode { parent, ..node }).is_none(), "{ino} was in use");
        self.node(dir).names.insert(name.to_vec(), ino);
        self.node(dir).links += u32::from(is_directory);
        self.touch(dir, at);
    }

    pub(super) fn link(&mut self, (dir, name): (Ino, &[u8]), ino: Ino, at: i64) {
        self.node(dir).names.insert(name.to_vec(), ino);
        self.touch(dir, at);
        self.node(ino).links += 1;
        self.node(ino).ctime = at;
    }

    fn drop_name(&mut self, dir: Ino, ino: Ino, at: i64) {
        let node = self.node(ino);
        node.ctime = at;
        let is_directory = node.is_directory();
        node.links -= if is_directory { 2 } else { 1 };
        if node.links == 0 {
            self.lost = self.nodes.remove(&ino).map(|node| (ino, node));
        }
        self.node(dir).links -= u32::from(is_directory);
    }

    pub(super) fn remove(&mut self, (dir, name): (Ino, &[u8]), at: i64) {
        let ino = self.node(dir).names.remove(name).unwrap();
        self.touch(dir, at);
        self.drop_name(dir, ino, at);
    }

    /// A directory has another one above it.
    fn set_parent(&mut self, ino: Ino, from: Ino, to: Ino) {
        if self.nodes[&ino].is_directory() && from != to {
            self.node(ino).parent = Some(to);
            self.node(from).links -= 1;
            self.node(to).links += 1;
        }
    }

    pub(super) fn rename(&mut self, from: NamePlace<'_>, to: NamePlace<'_>, how: Rename, at: i64) {
        let source = self.find(from.dir, from.name).unwrap();
        let target = self.find(to.dir, to.name);
        if target == Some(source) {
            return;
        }
        self.touch(from.dir, at);
        self.touch(to.dir, at);
        self.node(to.dir).names.insert(to.name.to_vec(), source);
        if how == Rename::Exchange {
            let target = target.unwrap();
            self.node(from.dir).names.insert(from.name.to_vec(), target);
            let pairs = [(source, target, from.dir, to.dir), (target, source, to.dir, from.dir)];
            for (ino, other, out_of, into) in pairs {
                if self.nodes[&ino].is_directory() && out_of != into {
                    self.touch(ino, at);
                    self.node(other).ctime = at;
                }
                self.set_parent(ino, out_of, into);
            }
            return;
        }
        self.node(source).ctime = at;
        self.node(from.dir).names.remove(from.name);
        if let Some(target) = target {
            self.drop_name(to.dir, target, at);
        }
        self.set_parent(source, from.dir, to.dir);
        self.wants_whiteout = how.whiteout().map(drop);
    }

    /// The parent pointers of both files of an exchange have changed.
    pub(super) fn touch_exchanged(&mut self, from: NamePlace<'_>, to: NamePlace<'_>, at: i64) {
        let both = [from, to].map(|place| self.find(place.dir, place.name).unwrap());
        if both[0] != both[1] {
            for ino in both {
                self.node(ino).ctime = at;
            }
        }
    }

    pub(super) fn add_whiteout(&mut self, from: NamePlace<'_>, ino: Ino, node: TreeNode) {
        self.node(from.dir).names.insert(from.name.to_vec(), ino);
        assert!(self.nodes.insert(ino, node).is_none());
    }

    /// All names that can be removed at once.
    pub(super) fn removable(&self) -> Vec<(Ino, Vec<u8>, bool)> {
        let mut all = Vec::new();
        for (dir, node) in &self.nodes {
            for (name, ino) in &node.names {
                let below = &self.nodes[ino];
                if below.names.is_empty() {
                    all.push((*dir, name.clone(), below.is_directory()));
                }
            }
        }
        all
    }

    /// The kernel finds the same tree at `path`.
    pub(super) fn assert_kernel_finds(&self, path: &Path) {
        self.assert_kernel_finds_node(path, self.root, i64::MAX);
    }

    /// The same when it has recovered the volume since `start`: it sets a time of each inode whose
    /// parent pointer it has changed then.
    pub(super) fn assert_kernel_recovers(&self, path: &Path, start: i64) {
        self.assert_kernel_finds_node(path, self.root, start);
    }

    fn assert_kernel_finds_node(&self, path: &Path, ino: Ino, recovered: i64) {
        let node = &self.nodes[&ino];
        let found = path.symlink_metadata().unwrap();
        let kind = found.file_type();
        let is_same_type = match node.file_type {
            FileType::Regular => kind.is_file(),
            FileType::Directory => kind.is_dir(),
            FileType::Symlink => kind.is_symlink(),
            FileType::CharDevice => kind.is_char_device(),
            FileType::BlockDevice => kind.is_block_device(),
            FileType::Fifo => kind.is_fifo(),
            FileType::Socket => kind.is_socket(),
        };
        assert!(is_same_type, "{path:?}");
        let numbers = (found.ino(), found.nlink(), found.mode() & 0o7777, found.uid(), found.gid());
        let owner = node.owner;
        assert_eq!(
            numbers,
            (ino.0, u64::from(node.links), node.permissions, owner.0, owner.1),
            "{path:?}"
        );
        let rdev = (rustix::fs::major(found.rdev()), rustix::fs::minor(found.rdev()));
        assert_eq!(rdev, node.rdev, "{path:?}");
        let ctime = if found.ctime() >= recovered { node.ctime } else { found.ctime() };
        assert_eq!((found.mtime(), ctime), (node.mtime, node.ctime), "{path:?}");
        if node.file_type == FileType::Symlink {
            let target = std::fs::read_link(path).unwrap();
            assert_eq!(target.as_os_str().as_bytes(), node.target, "{path:?}");
        }
        if node.is_directory() {
            let list = std::fs::read_dir(path).unwrap().map(|entry| {
                let name = entry.unwrap().file_name();
                name.as_bytes().to_vec()
            });
            let found: std::collections::BTreeSet<_> = list.collect();
            assert!(found.iter().eq(node.names.keys()), "{path:?}");
        }
        for (name, below) in &node.names {
            let path = path.join(OsStr::from_bytes(name));
            self.assert_kernel_finds_node(&path, *below, recovered);
        }
    }
}
