//! From a request to a call of the filesystem, and from its result to an answer.
//!
//! Requests are answered one by one, by whatever thread they come to, and hold nothing in common
//! but the table of nodes. The kernel keeps apart what may not happen at once: while a name is
//! made, removed or moved nobody else changes that directory, and who may do something was checked
//! before it is asked for (`default_permissions`).
//!
//! | module | requests |
//! |---|---|
//! | `session` | the beginning, sizes, durability, what is forgotten |
//! | `names` | names: looked up, made, moved, removed |
//! | `attributes` | attributes, extended ones, flags |
//! | `data` | open files and what is in them |
//! | `directory` | the entries of directories |
//!
//! What the rules of POSIX leave to whoever asks is decided here: set-id bits go with a change of
//! the owner, and with changes of the data by who may not keep them; a directory with the
//! set-group-id bit gives its group to what is made in it.
//!
//! INTERRUPT is not followed: no call of the filesystem can be given up half done, so a request
//! that is interrupted ends as if it were not.

mod attributes;
mod data;
mod directory;
mod names;
mod session;
#[cfg(test)]
mod tests;

pub(crate) use session::MAX_BYTES;

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use offshoot_vfs::{Attr, Errno, Error, FileId, FileSystemMut, NAME_MAX, Result};
use parking_lot::{Mutex, MutexGuard};

use crate::caches::KernelCaches;
use crate::listings::Listings;
use crate::mappable::Mappable;
use crate::nodes::{Nodes, is_gate};
use crate::options::{Owner, ServeOptions};
use crate::output::Output;
use crate::request::{Arguments, Malformed, Request, is_silent};
use crate::wire::opcode;

impl From<Malformed> for Error {
    fn from(_: Malformed) -> Self {
        Self::posix(Errno::INVAL, "a request that is not one")
    }
}

/// What becomes of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Answer {
    /// What is in the output is sent.
    Sent,
    /// The error is.
    Failed(Errno),
    /// Nothing is.
    Silence,
}

/// Locks under which permissions are looked at and set again, each for the nodes of a remainder: of
/// two direct writes at a time, and of changes between them, the kernel does not keep one from the
/// other.
#[derive(Default)]
struct Modes([Mutex<()>; 32]);

impl Modes {
    fn lock(&self, node: u64) -> MutexGuard<'_, ()> {
        self.0[usize::try_from(node % 32).expect("a lock")].lock()
    }
}

/// A filesystem that is mounted, without its mount.
pub(crate) struct Dispatcher {
    fs: Box<dyn FileSystemMut>,
    nodes: Arc<Nodes>,
    mappable: Arc<Mappable>,
    caches: KernelCaches,
    modes: Modes,
    listings: Listings,
    options: ServeOptions,
    /// SETXATTR has the long form.
    has_setxattr_ext: AtomicBool,
    /// Requests may come over io_uring, and after the first one: they do.
    has_rings: AtomicBool,
}

impl Dispatcher {
    /// That of the mount of `device`.
    pub(crate) fn new(
        fs: Box<dyn FileSystemMut>,
        options: ServeOptions,
        device: Arc<OwnedFd>,
    ) -> Self {
        let root = fs.root();
        let (nodes, mappable) = (Arc::new(Nodes::new(root)), Arc::<Mappable>::default());
        Self {
            fs,
            nodes: nodes.clone(),
            mappable: mappable.clone(),
            caches: KernelCaches::new(device, root, nodes, mappable),
            modes: Modes::default(),
            listings: Listings::default(),
            options,
            has_setxattr_ext: AtomicBool::new(false),
            has_rings: AtomicBool::new(false),
        }
    }

    /// What the kernel keeps of it.
    pub(crate) fn caches(&self) -> KernelCaches {
        self.caches.clone()
    }

    /// Lets the kernel send its requests over io_uring, if it can.
    pub(crate) fn offer_rings(&self) {
        self.has_rings.store(true, Ordering::Relaxed);
    }

    /// Whether the kernel sends its requests over io_uring. It is known when the first one is
    /// answered.
    pub(crate) fn has_rings(&self) -> bool {
        self.has_rings.load(Ordering::Relaxed)
    }

    /// Does what is asked for, and puts the answer into `out`.
    pub(crate) fn answer(&self, request: &Request<'_>, out: &mut Output<'_>) -> Answer {
        let op = request.header.opcode;
        let result = self.dispatch(op, &Context::new(self, request), request.arguments, out);
        match result {
            _ if is_silent(op) => Answer::Silence,
            Ok(true) => Answer::Sent,
            Ok(false) => Answer::Failed(Errno::NOSYS),
            Err(error) => {
                self.report(&error);
                Answer::Failed(error.errno())
            }
        }
    }

    /// Whether the request is known.
    fn dispatch(
        &self,
        op: u32,
        context: &Context<'_>,
        arguments: Arguments<'_>,
        out: &mut Output<'_>,
    ) -> Result<bool> {
        match op {
            opcode::LOOKUP => context.lookup(arguments, out),
            opcode::FORGET => context.forget(arguments),
            opcode::BATCH_FORGET => context.batch_forget(arguments),
            opcode::GETATTR => context.getattr(out),
            opcode::STATX => context.statx(out),
            opcode::SETATTR => context.setattr(arguments, out),
            opcode::READLINK => context.readlink(out),
            opcode::SYMLINK => context.symlink(arguments, out),
            opcode::MKNOD => context.mknod(arguments, out),
            opcode::MKDIR => context.mkdir(arguments, out),
            opcode::CREATE => context.create(arguments, out),
            opcode::TMPFILE => context.tmpfile(arguments, out),
            opcode::UNLINK => context.unlink(arguments),
            opcode::RMDIR => context.rmdir(arguments),
            opcode::RENAME => context.rename(arguments),
            opcode::RENAME2 => context.rename2(arguments),
            opcode::LINK => context.link(arguments, out),
            opcode::OPEN => context.open(arguments, out),
            opcode::READ => context.read(arguments, out),
            opcode::WRITE => context.write(arguments, out),
            opcode::LSEEK => context.lseek(arguments, out),
            opcode::FALLOCATE => context.fallocate(arguments),
            opcode::COPY_FILE_RANGE => context.copy_file_range(arguments, out),
            opcode::OPENDIR => context.opendir(out),
            opcode::RELEASEDIR => context.releasedir(arguments),
            opcode::READDIR => context.readdir(arguments, out),
            opcode::READDIRPLUS => context.readdirplus(arguments, out),
            opcode::SETXATTR => context.setxattr(arguments),
            opcode::GETXATTR => context.getxattr(arguments, out),
            opcode::LISTXATTR => context.listxattr(arguments, out),
            opcode::REMOVEXATTR => context.removexattr(arguments),
            opcode::IOCTL => context.ioctl(arguments, out),
            opcode::FSYNC => context.fsync(arguments),
            opcode::FSYNCDIR => context.fsyncdir(arguments),
            opcode::SYNCFS => self.fs.sync(),
            opcode::STATFS => context.statfs(out),
            opcode::INIT => self.init(arguments, out),
            opcode::RELEASE => context.release(arguments),
            opcode::DESTROY | opcode::INTERRUPT => Ok(()),
            _ => return Ok(false),
        }
        .map(|()| true)
    }

    pub(crate) fn report(&self, error: &Error) {
        let is_worth_it = !matches!(error, Error::Posix { errno, .. } if *errno != Errno::NOSPC);
        if let Some(reporter) = self.options.reporter.as_ref().filter(|_| is_worth_it) {
            reporter(error);
        }
    }

    fn has_setxattr_ext(&self) -> bool {
        self.has_setxattr_ext.load(Ordering::Relaxed)
    }

    /// The kernel is gone, and with it all that it knew: what it had open and nobody can reach any
    /// more goes. Then everything is made durable.
    pub(crate) fn end(&self) -> Result<()> {
        for file in self.nodes.forget_all() {
            self.release(file);
        }
        self.fs.sync()
    }

    pub(crate) fn sync(&self) -> Result<()> {
        self.fs.sync()
    }

    /// Lets go of a file that was held. It fails for nobody: what could not be removed is found
    /// when the volume is opened again.
    fn release(&self, file: FileId) {
        if let Err(error) = self.fs.release(file) {
            self.report(&error);
        }
    }
}

/// A request that is being answered: who asks, and about which node.
struct Context<'a> {
    to: &'a Dispatcher,
    node: u64,
    uid: u32,
    gid: u32,
}

impl<'a> Context<'a> {
    fn new(to: &'a Dispatcher, request: &Request<'_>) -> Self {
        let header = &request.header;
        Self { to, node: header.nodeid, uid: header.uid, gid: header.gid }
    }

    fn fs(&self) -> &dyn FileSystemMut {
        &*self.to.fs
    }

    /// The file that the request is about. A gate is none.
    fn file(&self) -> Result<FileId> {
        let file = self.to.nodes.file(self.node)?;
        if is_gate(file) {
            return Err(Error::posix(Errno::ACCESS, "a directory without a listing"));
        }
        Ok(file)
    }

    /// The attributes of what the request is about, and whom it is shown to belong to.
    fn attr(&self) -> Result<(Attr, Owner)> {
        let file = self.to.nodes.file(self.node)?;
        if is_gate(file) {
            return Ok((self.gate_attr(file)?, Owner::default()));
        }
        Ok((self.fs().attr(file)?, self.to.options.owner))
    }

    /// The attributes of a gate: only root may search it.
    fn gate_attr(&self, gate: FileId) -> Result<Attr> {
        let root = self.fs().attr(self.fs().root())?;
        Ok(Attr { file: gate, permissions: 0o700, uid: 0, gid: 0, ..root })
    }

    /// A name that the request has.
    fn name<'n>(&self, arguments: &mut Arguments<'n>) -> Result<&'n [u8]> {
        self.checked(arguments.name()?)
    }

    /// A name, unless it is longer than those of files.
    fn checked<'n>(&self, name: &'n [u8]) -> Result<&'n [u8]> {
        if name.len() > NAME_MAX {
            return Err(Error::posix(Errno::NAMETOOLONG, format!("a name in {}", self.file()?)));
        }
        Ok(name)
    }
}
