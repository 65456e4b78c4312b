//! Names: looked up, made, moved and removed.

use offshoot_vfs::{
    Attr, EntryPlace, Errno, Error, FileId, FileType, NewFile, NewNode, Rename, Result, Timestamp,
};
use rustix::fs::{OFlags, RenameFlags};

use super::RequestContext;
use crate::attributes::{device_of, entry_out, no_entry};
use crate::nodes::{gate_in, is_gate};
use crate::output::AnswerBody;
use crate::request::RequestArguments;
use crate::wire::{CreateIn, EntryOut, LinkIn, MkdirIn, MknodIn, ROOT_NODE, Rename2In, RenameIn};

/// The set-group-id bit.
const SGID: u32 = 0o2000;

impl RequestContext<'_> {
    pub(super) fn lookup(
        &self,
        mut arguments: RequestArguments<'_>,
        out: &mut AnswerBody<'_>,
    ) -> Result<()> {
        if let Some(up) = arguments.dots() {
            return self.lookup_dots(up, out);
        }
        let name = arguments.name()?;
        if let Some(gate) = self.to.options.gate.as_ref().filter(|_| self.uid == 0) {
            let dir = self.to.nodes.file(self.node)?;
            if is_gate(dir) {
                return match (gate.find)(name) {
                    Some(file) => self.put_entry(file, out),
                    None => Err(Error::posix(Errno::NOENT, "nothing behind the gate")),
                };
            }
            if name == gate.name {
                let attr = self.gate_attr(gate_in(dir))?;
                let (node, number) = (self.to.nodes.told(attr.file)?, self.number(attr.file));
                return out.put(&entry_out(node, number, &attr, self.shown_gate()));
            }
        }
        let name = self.checked(name)?;
        let dir = self.file()?;
        let found = self.fs().lookup(dir, name).and_then(|file| {
            let node = self.to.nodes.told(file)?;
            self.entry_of(node, || self.fs().attr_of_entry(dir, name, file))
        });
        match found {
            Ok(entry) => out.put(&entry),
            Err(Error::Posix { errno: Errno::NOENT, .. }) => out.put(&no_entry()),
            Err(error) => Err(error),
        }
    }

    /// Finds a file by its node alone, or the directory that holds a directory. The kernel asks for
    /// both when a program comes with a file handle (`open_by_handle_at`, NFS) whose file it does
    /// not know. It compares the generation in the answer with that in the handle. A file without a
    /// name is stale, and so are all files of a subvolume without one: the kernel would know the
    /// file if a program had it open, and so the FORGET for it is on its way. The root of the mount
    /// has another node than the handle says if it was not the root when the handle was made.
    ///
    /// No lock of a directory keeps the file from losing its last name meanwhile. So where its
    /// number may be given again, it is held first: what has the number then keeps it.
    fn lookup_dots(&self, up: bool, out: &mut AnswerBody<'_>) -> Result<()> {
        let known = self.file()?;
        let stale = || Error::posix(Errno::STALE, format!("a handle of {known}"));
        let file = if up { self.fs().parent(known)?.ok_or_else(stale)?.dir } else { known };
        if !up && file == self.fs().root() && self.node != ROOT_NODE {
            return Err(stale());
        }
        let node = self.to.nodes.told(file)?;
        let entry = self.entry_of(node, || {
            if self.fs().reuses_numbers() && file != self.fs().root() {
                self.hold(file)?;
            }
            if let Some(volume) = &self.to.options.volume {
                volume.clone().files(file.dev)?;
            }
            let attr = self.fs().attr(file)?;
            if attr.nlink > 0 { Ok(attr) } else { Err(stale()) }
        });
        match entry {
            Ok(entry) => out.put(&entry),
            Err(Error::Posix { errno: Errno::NOENT, .. }) => Err(stale()),
            Err(error) => Err(error),
        }
    }

    pub(super) fn readlink(&self, out: &mut AnswerBody<'_>) -> Result<()> {
        out.put_bytes(&self.fs().read_link(self.file()?)?)
    }

    pub(super) fn symlink(
        &self,
        mut arguments: RequestArguments<'_>,
        out: &mut AnswerBody<'_>,
    ) -> Result<()> {
        let name = self.name(&mut arguments)?;
        let target = arguments.text()?;
        let place = self.place(name)?;
        let new = self.new_file(place.dir, 0o777, 0, false)?;
        self.put_new(self.fs().symlink(place, target, &new)?, out)
    }

    pub(super) fn mknod(
        &self,
        mut arguments: RequestArguments<'_>,
        out: &mut AnswerBody<'_>,
    ) -> Result<()> {
        let mknod: MknodIn = arguments.take()?;
        let place = self.place(self.name(&mut arguments)?)?;
        let file_type = FileType::from_mode(mknod.mode)
            .ok_or_else(|| Error::posix(Errno::INVAL, format!("mode {:o}", mknod.mode)))?;
        let new = self.new_file(place.dir, mknod.mode, mknod.umask, false)?;
        let is_device = matches!(file_type, FileType::CharDevice | FileType::BlockDevice);
        let rdev = if is_device { device_of(mknod.rdev) } else { (0, 0) };
        self.put_new(self.fs().mknod(place, NewNode { file_type, rdev }, &new)?, out)
    }

    pub(super) fn mkdir(
        &self,
        mut arguments: RequestArguments<'_>,
        out: &mut AnswerBody<'_>,
    ) -> Result<()> {
        let mkdir: MkdirIn = arguments.take()?;
        let place = self.place(self.name(&mut arguments)?)?;
        let new = self.new_file(place.dir, mkdir.mode, mkdir.umask, true)?;
        self.put_new(self.fs().mkdir(place, &new)?, out)
    }

    pub(super) fn create(
        &self,
        mut arguments: RequestArguments<'_>,
        out: &mut AnswerBody<'_>,
    ) -> Result<()> {
        let create: CreateIn = arguments.take()?;
        let place = self.place(self.name(&mut arguments)?)?;
        let new = self.new_file(place.dir, create.mode, create.umask, false)?;
        let file = self.fs().create(place, &new)?;
        self.put_new(file, out)?;
        self.to.mappable.opened(file, create.flags);
        out.put(&super::data::open_out())
    }

    /// A file without a name is open from the beginning, and the mount keeps that opening.
    pub(super) fn tmpfile(
        &self,
        mut arguments: RequestArguments<'_>,
        out: &mut AnswerBody<'_>,
    ) -> Result<()> {
        let create: CreateIn = arguments.take()?;
        let dir = self.file()?;
        let new = self.new_file(dir, create.mode, create.umask, false)?;
        let is_linkable = create.flags & OFlags::EXCL.bits() == 0;
        let file = self.fs().create_unnamed(dir, is_linkable, &new)?;
        let put = self.put_new(file, out);
        if put.is_err() || !self.to.nodes.hold(file) {
            self.to.release(file);
        }
        put?;
        self.to.mappable.opened(file, create.flags);
        out.put(&super::data::open_out())
    }

    pub(super) fn unlink(&self, mut arguments: RequestArguments<'_>) -> Result<()> {
        let place = self.place(self.name(&mut arguments)?)?;
        self.hold(self.fs().lookup(place.dir, place.name)?)?;
        self.fs().unlink(place, Timestamp::now())
    }

    pub(super) fn rmdir(&self, mut arguments: RequestArguments<'_>) -> Result<()> {
        let place = self.place(self.name(&mut arguments)?)?;
        self.hold(self.fs().lookup(place.dir, place.name)?)?;
        self.fs().rmdir(place, Timestamp::now())
    }

    pub(super) fn rename(&self, mut arguments: RequestArguments<'_>) -> Result<()> {
        let rename: RenameIn = arguments.take()?;
        self.move_name(rename.newdir, Rename::Replace, arguments)
    }

    pub(super) fn rename2(&self, mut arguments: RequestArguments<'_>) -> Result<()> {
        let rename: Rename2In = arguments.take()?;
        let flags = RenameFlags::from_bits_retain(rename.flags);
        let replaces = !flags.contains(RenameFlags::NOREPLACE);
        let how = match flags - RenameFlags::NOREPLACE {
            RenameFlags::WHITEOUT => {
                Rename::Whiteout { new: self.new_file(self.file()?, 0, 0, false)?, replaces }
            }
            RenameFlags::EXCHANGE if replaces => Rename::Exchange,
            rest if !rest.is_empty() => {
                return Err(Error::posix(Errno::INVAL, format!("a move with the flags {flags:?}")));
            }
            _ if replaces => Rename::Replace,
            _ => Rename::NoReplace,
        };
        self.move_name(rename.newdir, how, arguments)
    }

    fn move_name(&self, to: u64, how: Rename, mut arguments: RequestArguments<'_>) -> Result<()> {
        let from = self.place(self.name(&mut arguments)?)?;
        let to = EntryPlace { dir: self.to.nodes.file(to)?, name: self.name(&mut arguments)? };
        if how.replaces() {
            match self.fs().lookup(to.dir, to.name) {
                Ok(file) => self.hold(file)?,
                Err(Error::Posix { errno: Errno::NOENT, .. }) => {}
                Err(error) => return Err(error),
            }
        }
        self.fs().rename_with(from, to, how, Timestamp::now())
    }

    pub(super) fn link(
        &self,
        mut arguments: RequestArguments<'_>,
        out: &mut AnswerBody<'_>,
    ) -> Result<()> {
        let link: LinkIn = arguments.take()?;
        let file = self.to.nodes.file(link.oldnodeid)?;
        let place = self.place(self.name(&mut arguments)?)?;
        self.fs().link(file, place, Timestamp::now())?;
        self.put_entry(file, out)
    }

    /// This name in the directory that the request is about.
    fn place<'n>(&self, name: &'n [u8]) -> Result<EntryPlace<'n>> {
        Ok(EntryPlace { dir: self.file()?, name })
    }

    /// The first attributes of a file that is made in `dir`.
    fn new_file(&self, dir: FileId, mode: u32, umask: u32, is_directory: bool) -> Result<NewFile> {
        let parent = self.fs().attr(dir)?;
        let owner = self.to.options.owner;
        let has_group = parent.permissions & SGID != 0;
        let inherited = if has_group && is_directory { SGID } else { 0 };
        Ok(NewFile {
            permissions: mode & 0o7777 | inherited,
            uid: if owner.uid.is_some() { parent.uid } else { self.uid },
            gid: if has_group || owner.gid.is_some() { parent.gid } else { self.gid },
            umask: Some(umask & 0o777),
            at: Timestamp::now(),
        })
    }

    /// Keeps `file`, which is about to lose a name, usable until the kernel forgets it.
    fn hold(&self, file: FileId) -> Result<()> {
        if !self.to.nodes.may_be_held(file) {
            return Ok(());
        }
        // A request that finds the file held relies on the opening, so that comes first.
        self.fs().open(file)?;
        if self.to.nodes.hold(file) { Ok(()) } else { self.fs().release(file) }
    }

    /// The node and the attributes of `file`, of which the kernel is told.
    pub(super) fn told(&self, file: FileId) -> Result<EntryOut> {
        self.entry_of(self.to.nodes.told(file)?, || self.fs().attr(file))
    }

    /// Answers with the node and the attributes of `file`.
    fn put_entry(&self, file: FileId, out: &mut AnswerBody<'_>) -> Result<()> {
        out.put(&self.told(file)?)
    }

    /// As [`Self::put_entry`], for a file that was just made. No other request knows the name
    /// before this answer.
    fn put_new(&self, file: FileId, out: &mut AnswerBody<'_>) -> Result<()> {
        out.put(&self.entry_of(self.to.nodes.told_new(file)?, || self.fs().attr(file))?)
    }

    /// The entry of a file whose node was just told, with its attributes. They are read after the
    /// lookup is counted: a thread that removes the file meanwhile keeps it usable then. If that
    /// fails, the lookup does not count.
    pub(super) fn entry_of(
        &self,
        node: u64,
        attr: impl FnOnce() -> Result<Attr>,
    ) -> Result<EntryOut> {
        let attr = attr().inspect_err(|_| self.forget_node(node, 1))?;
        Ok(entry_out(node, self.number(attr.file), &attr, self.to.shown))
    }
}
