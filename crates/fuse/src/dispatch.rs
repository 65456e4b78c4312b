//! From a request to a call of the filesystem, and from its result to an answer.
//!
//! The thread that receives a request answers it. Requests share only the tables of this crate,
//! each locked for a moment, and the locks of [`ModeLocks`]. The kernel keeps conflicting requests
//! apart: while it makes, removes or moves a name, it sends no other change of that directory. It
//! checks permissions before it sends a request (`default_permissions`).
//!
//! | module | requests |
//! |---|---|
//! | `session` | INIT, sizes, durability, FORGET |
//! | `names` | names: looked up, made, moved, removed |
//! | `attributes` | attributes, and extended ones |
//! | `data` | open files and their data |
//! | `directory` | the entries of directories |
//! | `ioctls` | flags, generations, labels, trimming, shutdown |
//!
//! This module applies the rules of POSIX that the filesystem leaves to its caller. A change of the
//! owner clears the set-id bits, and so does a change of the data by a program that may not keep
//! them. A directory with the set-group-id bit gives its group to files that are made in it.
//!
//! With mapped ids ([`ServeOptions::allows_idmap`]) the kernel names the user only in requests that
//! make files: [`UNKNOWN`] stands for the user and the group in all others. This module treats
//! such a user as one without rights.
//!
//! INTERRUPT has no effect: no call of the filesystem can stop half done, so an interrupted request
//! completes as usual.

mod attributes;
mod data;
mod directory;
mod ioctls;
mod names;
mod session;
#[cfg(test)]
mod tests;

pub(crate) use session::{LARGE_BYTES, MAX_BYTES};

use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

use offshoot_kit::spread::SpreadRwLock;
use offshoot_vfs::{Attr, Errno, Error, FileId, FileSystemMut, NAME_MAX, Result, Volume};
use parking_lot::{Mutex, MutexGuard};

use crate::caches::KernelCaches;
use crate::listings::OpenListings;
use crate::mappable::Mappable;
use crate::nodes::{FileNumbers, KnownFiles, is_gate};
use crate::options::{ServeOptions, ShownFiles, ShownOwner};
use crate::output::AnswerBody;
use crate::request::{MalformedRequest, Request, RequestArguments, is_silent};
use crate::watch::RequestWatch;
use crate::wire::opcode;

impl From<MalformedRequest> for Error {
    fn from(_: MalformedRequest) -> Self {
        Self::posix(Errno::INVAL, "a request that is not one")
    }
}

/// Whether requests with this opcode change something, or make it durable.
fn writes(op: u32) -> bool {
    use opcode::{
        COPY_FILE_RANGE, CREATE, FALLOCATE, FSYNC, FSYNCDIR, LINK, MKDIR, MKNOD, REMOVEXATTR,
        RENAME, RENAME2, RMDIR, SETATTR, SETXATTR, SYMLINK, TMPFILE, UNLINK, WRITE,
    };
    let of_data = matches!(op, WRITE | COPY_FILE_RANGE | FALLOCATE | FSYNC | FSYNCDIR);
    let of_names = matches!(op, LINK | UNLINK | RMDIR | RENAME | RENAME2);
    let of_new = matches!(op, CREATE | MKNOD | MKDIR | SYMLINK | TMPFILE);
    of_data || of_names || of_new || matches!(op, SETATTR | SETXATTR | REMOVEXATTR)
}

/// The outcome of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Answer {
    /// The transport sends the output.
    Sent,
    /// The transport sends the error.
    Failed(Errno),
    /// The transport sends nothing.
    Silence,
}

/// Locks under which a thread reads permissions and sets them again. The kernel does not keep two
/// direct writes to a file apart, nor changes of attributes between them. Each lock is for the
/// nodes with one remainder by 32.
#[derive(Default)]
struct ModeLocks([Mutex<()>; 32]);

impl ModeLocks {
    fn lock(&self, node: u64) -> MutexGuard<'_, ()> {
        self.0[usize::try_from(node % 32).expect("a lock")].lock()
    }
}

/// Answers the requests of a mount, whatever transport they come over.
pub(crate) struct Dispatcher {
    fs: Box<dyn FileSystemMut>,
    nodes: Arc<KnownFiles>,
    mappable: Arc<Mappable>,
    caches: KernelCaches,
    modes: ModeLocks,
    listings: OpenListings,
    watch: Arc<RequestWatch>,
    options: ServeOptions,
    shown: ShownFiles,
    /// The user who serves the mount.
    manager: u32,
    /// SETXATTR has the long form.
    has_setxattr_ext: AtomicBool,
    /// The mount can be shown with mapped ids.
    has_idmap: AtomicBool,
    /// A program has shut the filesystem down: all that is left is to end the mount.
    is_shut_down: AtomicBool,
    /// The shutdown has stored everything.
    is_stored: AtomicBool,
    /// Called when DESTROY has ended all writing.
    when_destroyed: OnceLock<Box<dyn Fn() + Send + Sync>>,
    /// A shutdown waits for requests that write, which hold this shared.
    writing: SpreadRwLock<()>,
    /// Before INIT: this process offers io_uring. After INIT: requests come over io_uring.
    has_rings: AtomicBool,
}

impl Dispatcher {
    /// The dispatcher of the mount of `device`.
    pub(crate) fn new(
        fs: Box<dyn FileSystemMut>,
        options: ServeOptions,
        device: Arc<OwnedFd>,
    ) -> Self {
        let numbers = FileNumbers { plain_space: options.plain_space };
        let nodes = Arc::new(KnownFiles::new(fs.root(), numbers));
        let mappable = Arc::<Mappable>::default();
        Self {
            fs,
            nodes: nodes.clone(),
            mappable: mappable.clone(),
            caches: KernelCaches::new(device, nodes, mappable),
            modes: ModeLocks::default(),
            listings: OpenListings::default(),
            watch: Arc::default(),
            shown: options.shown(),
            options,
            manager: rustix::process::geteuid().as_raw(),
            has_setxattr_ext: AtomicBool::new(false),
            has_idmap: AtomicBool::new(false),
            is_shut_down: AtomicBool::new(false),
            is_stored: AtomicBool::new(false),
            when_destroyed: OnceLock::new(),
            writing: SpreadRwLock::with_few_copies("requests", || ()),
            has_rings: AtomicBool::new(false),
        }
    }

    /// The caches of the kernel.
    pub(crate) fn caches(&self) -> KernelCaches {
        self.caches.clone()
    }

    /// Makes the answer to INIT offer io_uring.
    pub(crate) fn offer_rings(&self) {
        self.has_rings.store(true, Ordering::Relaxed);
    }

    /// Whether the kernel sends its requests over io_uring. Valid after INIT is answered.
    pub(crate) fn has_rings(&self) -> bool {
        self.has_rings.load(Ordering::Relaxed)
    }

    /// Whether the options ask for mapped ids, and the kernel has none for FUSE. Valid after INIT
    /// is answered.
    pub(crate) fn lacks_idmap(&self) -> bool {
        self.options.allows_idmap && !self.has_idmap.load(Ordering::Relaxed)
    }

    /// Carries out the request, and puts the answer into `out`.
    pub(crate) fn answer(&self, request: &Request<'_>, out: &mut AnswerBody<'_>) -> Answer {
        let op = request.header.opcode;
        let watched = self.watch.begin(&request.header);
        let result = self.dispatch(op, &RequestContext::new(self, request), request.arguments, out);
        let answer = match result {
            _ if is_silent(op) => Answer::Silence,
            Ok(true) => Answer::Sent,
            Ok(false) => Answer::Failed(Errno::NOSYS),
            Err(error) => {
                self.report(&error);
                Answer::Failed(error.errno())
            }
        };
        if let Some(unique) = watched {
            self.watch.end(unique, answer);
        }
        answer
    }

    fn is_shut_down(&self) -> bool {
        self.is_shut_down.load(Ordering::SeqCst)
    }

    /// Refuses most requests after a shutdown. A program that unmounts looks at the directory, and
    /// asks whether everything is stored.
    fn require_up(&self, op: u32) -> Result<()> {
        use opcode::{DESTROY, FSYNCDIR, GETATTR, OPENDIR, RELEASE, RELEASEDIR, STATX, SYNCFS};
        let is_of_end = matches!(op, DESTROY | FSYNCDIR | GETATTR | OPENDIR | STATX | SYNCFS)
            || matches!(op, RELEASE | RELEASEDIR);
        if is_of_end || is_silent(op) || !self.is_shut_down() {
            return Ok(());
        }
        Err(Error::posix(Errno::IO, "the filesystem was shut down"))
    }

    /// Returns `false` for an unknown opcode.
    fn dispatch(
        &self,
        op: u32,
        context: &RequestContext<'_>,
        arguments: RequestArguments<'_>,
        out: &mut AnswerBody<'_>,
    ) -> Result<bool> {
        let _writing = writes(op).then(|| self.writing.read());
        self.require_up(op)?;
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
            opcode::SYNCFS => self.sync(),
            opcode::STATFS => context.statfs(out),
            opcode::INIT => self.init(arguments, out),
            opcode::RELEASE => context.release(arguments),
            opcode::DESTROY => self.destroy(),
            opcode::INTERRUPT => Ok(()),
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

    /// Whether everything is stored, and all writing has ended.
    pub(crate) fn is_stored(&self) -> bool {
        self.is_stored.load(Ordering::SeqCst)
    }

    /// Makes the end of DESTROY call `act`. Has no effect a second time.
    pub(crate) fn when_destroyed(&self, act: Box<dyn Fn() + Send + Sync>) {
        let _ = self.when_destroyed.set(act);
    }

    /// Ends the session while the kernel waits. When this is answered, the kernel gives up the
    /// block device of the mount, so nothing may be written from then on.
    fn destroy(&self) -> Result<()> {
        let ended = self.end();
        if let Some(act) = self.when_destroyed.get() {
            act();
        }
        ended
    }

    /// Makes everything durable, and ends all writing. Most requests fail from then on.
    fn shut_down(&self, volume: &dyn Volume) -> Result<()> {
        self.is_shut_down.store(true, Ordering::SeqCst);
        // Requests that change something wait for this lock, and then learn how the shutdown went.
        let _writing = self.writing.write();
        volume.shut_down()?;
        self.is_stored.store(true, Ordering::SeqCst);
        Ok(())
    }

    fn release_all(&self) {
        for file in self.nodes.forget_all() {
            self.release(file);
        }
    }

    /// Ends the session: the kernel has ended the mount and forgotten all nodes. Releases every
    /// held file, makes all changes durable, and ends all writing, as an unmount does.
    pub(crate) fn end(&self) -> Result<()> {
        self.release_all();
        match &self.options.volume {
            Some(volume) if !self.is_shut_down() => self.shut_down(&**volume),
            _ => self.sync(),
        }
    }

    /// Makes all changes durable. After a shutdown that is done, or cannot be done any more.
    pub(crate) fn sync(&self) -> Result<()> {
        if !self.is_shut_down() {
            return self.fs.sync();
        }
        if self.is_stored.load(Ordering::SeqCst) {
            return Ok(());
        }
        Err(Error::posix(Errno::IO, "the filesystem was shut down before everything was stored"))
    }

    /// Releases a file that was held. No request waits for this, so an error is only reported: the
    /// next opening of the volume finds a file that could not be removed.
    fn release(&self, file: FileId) {
        if let Err(error) = self.fs.release(file) {
            self.report(&error);
        }
    }
}

/// The user and the group of a request when the kernel does not name them.
const UNKNOWN: u32 = u32::MAX;

/// The user and the node of a request that is being answered.
struct RequestContext<'a> {
    to: &'a Dispatcher,
    node: u64,
    uid: u32,
    gid: u32,
}

impl<'a> RequestContext<'a> {
    fn new(to: &'a Dispatcher, request: &Request<'_>) -> Self {
        let header = &request.header;
        Self { to, node: header.nodeid, uid: header.uid, gid: header.gid }
    }

    fn fs(&self) -> &dyn FileSystemMut {
        &*self.to.fs
    }

    /// The file that the request is about.
    fn file(&self) -> Result<FileId> {
        let file = self.to.nodes.file(self.node)?;
        if is_gate(file) {
            return Err(Error::posix(Errno::ACCESS, "a directory without a listing"));
        }
        Ok(file)
    }

    /// The number that a file shows.
    fn number(&self, file: FileId) -> u64 {
        self.to.nodes.numbers.number(file)
    }

    /// How the mount shows a gate.
    fn shown_gate(&self) -> ShownFiles {
        ShownFiles { owner: ShownOwner::default(), ..self.to.shown }
    }

    /// The attributes of the file or gate that the request is about, and how the mount shows it.
    fn attr(&self) -> Result<(Attr, ShownFiles)> {
        let file = self.to.nodes.file(self.node)?;
        if is_gate(file) {
            return Ok((self.gate_attr(file)?, self.shown_gate()));
        }
        Ok((self.fs().attr(file)?, self.to.shown))
    }

    /// The attributes of a gate: only root may search it.
    fn gate_attr(&self, gate: FileId) -> Result<Attr> {
        let root = self.fs().attr(self.fs().root())?;
        Ok(Attr { file: gate, permissions: 0o700, uid: 0, gid: 0, ..root })
    }

    /// Takes a name from the request.
    fn name<'n>(&self, arguments: &mut RequestArguments<'n>) -> Result<&'n [u8]> {
        self.checked(arguments.name()?)
    }

    /// Refuses a name that is longer than names of files can be.
    fn checked<'n>(&self, name: &'n [u8]) -> Result<&'n [u8]> {
        if name.len() > NAME_MAX {
            return Err(Error::posix(Errno::NAMETOOLONG, format!("a name in {}", self.file()?)));
        }
        Ok(name)
    }
}
