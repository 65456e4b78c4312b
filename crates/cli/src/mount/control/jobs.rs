//! The verbs that the process which serves a mount runs for clients.
//!
//! A job has a thread of its own, outside the threads of the mount. It keeps up to [`MOST_BYTES`]
//! of output that the client has not fetched; then it waits. The thread does what every run of the
//! program does, but with a volume that is open already and with streams that lead to the client.
//!
//! A job counts while its thread runs or its directory is open, so there are never more than
//! [`MOST_JOBS`].
//!
//! Lock order: the table of jobs, then the state of a job. No lock is taken under the state of a
//! job.

use std::collections::{HashMap, VecDeque};
use std::ffi::OsString;
use std::io::{self, BufWriter, Write};
use std::iter;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread;

use clap::Parser;
use offshoot_fuse::{Ioctl, Ioctls, KernelCaches, ShownOwner};
use offshoot_vfs::{Errno, Error, Result};
use rustix::ioctl::Opcode;
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

use super::super::gate;
use super::channel::{NEXT, START};
use super::{MOST_JOBS, NEXT_MOST, Next, PATIENCE, StartRequest};
use crate::args::Arguments;
use crate::edit::Caller;
use crate::exit::{self, VerbFailure};
use crate::live::ServedVolume;
use crate::output::Console;
use crate::rights::Rights;
use crate::session::OpenTree;
use crate::verbs;

/// How much output a job keeps, in bytes.
const MOST_BYTES: usize = 64 << 10;

/// The jobs of a mount.
pub(in crate::mount) struct Jobs {
    fs: OpenTree,
    volume: PathBuf,
    owner: ShownOwner,
    /// The options that the volume was mounted with.
    options: Vec<String>,
    /// The user who may start jobs, besides root.
    uid: u32,
    /// The groups of that user.
    groups: Vec<u32>,
    /// The CPUs of new job threads. A thread of the mount starts them, and it is bound to one CPU.
    cpus: Option<CpuSet>,
    /// Set when the filesystem is mounted.
    caches: OnceLock<KernelCaches>,
    /// The jobs by their open directory.
    table: Mutex<HashMap<u64, Arc<ControlJob>>>,
    /// Each job holds a clone, so the number of clones is the number of jobs.
    slots: Arc<()>,
}

/// A job that runs, or that has ended and was not fetched.
struct ControlJob {
    state: Mutex<ControlState>,
    changed: Condvar,
    _slot: Arc<()>,
}

#[derive(Default)]
struct ControlState {
    /// The output that was not fetched, in order.
    printed: VecDeque<(OutputStream, Vec<u8>)>,
    bytes: usize,
    /// The exit code, once it ended.
    ended: Option<u32>,
    /// The directory was closed, so no client will fetch the output.
    is_dropped: bool,
    /// A NEXT is waiting for output.
    is_asked: bool,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum OutputStream {
    Out,
    Err,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The supplementary groups of this process; empty if they cannot be read.
fn groups() -> Vec<u32> {
    let groups = rustix::process::getgroups().unwrap_or_default();
    groups.into_iter().map(rustix::process::Gid::as_raw).collect()
}

impl Jobs {
    /// An empty set of jobs, for a mount of `fs` that shows files with this owner.
    pub(in crate::mount) fn new(
        fs: OpenTree,
        volume: PathBuf,
        owner: ShownOwner,
        options: Vec<String>,
    ) -> Self {
        Self {
            fs,
            volume,
            owner,
            options,
            uid: rustix::process::geteuid().as_raw(),
            groups: groups(),
            cpus: sched_getaffinity(None).ok(),
            caches: OnceLock::new(),
            table: Mutex::default(),
            slots: Arc::new(()),
        }
    }

    /// The filesystem is mounted: from now on there can be jobs.
    pub(in crate::mount) fn begin(&self, caches: KernelCaches) {
        // This is called once, so the cell is empty.
        let _ = self.caches.set(caches);
    }

    fn start(&self, ioctl: &Ioctl<'_>) -> Result<()> {
        let StartRequest { umask, at, words, mut places } = StartRequest::decode(ioctl.data)?;
        let fs = self.tree_of(&mut places)?;
        let busy = || Error::posix(Errno::AGAIN, "a job of a mount");
        let caller = Caller {
            uid: self.owner.uid.is_none().then_some(ioctl.uid),
            gid: self.owner.gid.is_none().then_some(ioctl.gid),
            umask,
            at,
        };
        let caches = self.caches.get().ok_or_else(busy)?.clone();
        let job = {
            let mut table = lock(&self.table);
            if table.get(&ioctl.directory).is_some_and(|job| lock(&job.state).ended.is_none()) {
                return Err(Error::posix(Errno::BUSY, "a second job of one open directory"));
            }
            if Arc::strong_count(&self.slots) > MOST_JOBS {
                return Err(busy());
            }
            let job = Arc::new(ControlJob {
                state: Mutex::default(),
                changed: Condvar::new(),
                _slot: self.slots.clone(),
            });
            table.insert(ioctl.directory, job.clone());
            job
        };
        let wanted = job.clone();
        let live = ServedVolume {
            fs,
            volume: self.volume.clone(),
            first: self.fs.root().dev,
            options: self.options.clone(),
            caches,
            caller,
            rights: self.rights_of(ioctl),
            is_wanted: Box::new(move || !lock(&wanted.state).is_dropped),
        };
        let cpus = self.cpus;
        let run = move || {
            if let Some(cpus) = &cpus {
                // If the kernel refuses this, the thread stays on its CPU.
                let _ = sched_setaffinity(None, cpus);
            }
            let work = || perform(words, places, live, &job);
            // A panic may leave the volume in an unknown state, as in the threads of the mount.
            let code =
                catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|_| std::process::abort());
            lock(&job.state).ended = Some(code);
            job.changed.notify_all();
        };
        let started = thread::Builder::new().name("job".to_owned()).spawn(run);
        started.map(drop).map_err(|error| {
            self.closed(ioctl.directory);
            Error::io("starting a thread", error)
        })
    }

    /// The tree of files that contains all `places`: the mounted one, or another subvolume that is
    /// mounted elsewhere. Changes `places` to paths in that tree.
    fn tree_of(&self, places: &mut [OsString]) -> Result<OpenTree> {
        let ids: Vec<Option<u64>> = places
            .iter_mut()
            .map(|place| {
                let (id, path) = gate::split(Path::new(&*place))?;
                *place = path.into();
                Some(id)
            })
            .collect();
        if ids.windows(2).any(|pair| pair[0] != pair[1]) {
            return Err(Error::posix(Errno::XDEV, "places in several mounts of a volume"));
        }
        match ids.first().copied().flatten() {
            Some(id) => self.fs.at(id),
            None => Ok(self.fs.clone()),
        }
    }

    /// The rights of the caller. FUSE passes only one group; the other groups are those of this
    /// process, because it runs as the same user.
    fn rights_of(&self, ioctl: &Ioctl<'_>) -> Option<Rights> {
        let groups = || [&[ioctl.gid], &self.groups[..]].concat();
        (ioctl.uid != 0).then(|| Rights { uid: ioctl.uid, groups: groups(), shown: self.owner })
    }

    fn next(&self, directory: u64) -> Result<Next> {
        let job = lock(&self.table).get(&directory).cloned();
        let job = job.ok_or_else(|| Error::posix(Errno::INVAL, "a job that was not started"))?;
        job.next()
    }
}

impl Ioctls for Jobs {
    fn answer(&self, ioctl: &Ioctl<'_>) -> Result<Vec<u8>> {
        // An opcode is 32 bits, in an integer that is longer with some C libraries, and signed with
        // others.
        let command = ioctl.command.to_le_bytes();
        let is = |opcode: Opcode| opcode.to_le_bytes().starts_with(&command);
        if !is(START) && !is(NEXT) {
            return Err(Error::posix(Errno::NOTTY, format!("ioctl {:#x}", ioctl.command)));
        }
        if ioctl.uid != 0 && ioctl.uid != self.uid {
            return Err(Error::posix(Errno::PERM, "a job of a mount"));
        }
        if is(START) {
            return self.start(ioctl).map(|()| Vec::new());
        }
        self.next(ioctl.directory).map(|next| next.encode())
    }

    fn closed(&self, directory: u64) {
        if let Some(job) = lock(&self.table).remove(&directory) {
            lock(&job.state).is_dropped = true;
            job.changed.notify_all();
        }
    }
}

impl ControlJob {
    /// The next event of the job. Waits for at most [`PATIENCE`].
    fn next(&self) -> Result<Next> {
        let mut state = lock(&self.state);
        if state.is_asked {
            return Err(Error::posix(Errno::BUSY, "another request waits for this job"));
        }
        state.is_asked = true;
        let is_quiet = |state: &mut ControlState| state.printed.is_empty() && state.ended.is_none();
        let waited = self.changed.wait_timeout_while(state, PATIENCE, is_quiet);
        let (mut state, _) = waited.unwrap_or_else(PoisonError::into_inner);
        state.is_asked = false;
        let Some((stream, bytes)) = state.printed.pop_front() else {
            return Ok(state.ended.map_or(Next::Nothing, Next::Ended));
        };
        state.bytes -= bytes.len();
        self.changed.notify_all();
        Ok(match stream {
            OutputStream::Out => Next::Out(bytes),
            OutputStream::Err => Next::Err(bytes),
        })
    }

    /// Waits for room, and keeps the output or a part of it. Returns how much it kept, in bytes.
    fn print(&self, stream: OutputStream, bytes: &[u8]) -> io::Result<usize> {
        let is_full = |state: &mut ControlState| state.bytes >= MOST_BYTES && !state.is_dropped;
        let waited = self.changed.wait_while(lock(&self.state), is_full);
        let mut state = waited.unwrap_or_else(PoisonError::into_inner);
        if state.is_dropped {
            return Err(io::ErrorKind::BrokenPipe.into());
        }
        let bytes = &bytes[..bytes.len().min(NEXT_MOST).min(MOST_BYTES - state.bytes)];
        state.bytes += bytes.len();
        match state.printed.back_mut() {
            Some((last, kept)) if *last == stream && kept.len() + bytes.len() <= NEXT_MOST => {
                kept.extend_from_slice(bytes);
            }
            _ => state.printed.push_back((stream, bytes.to_vec())),
        }
        self.changed.notify_all();
        Ok(bytes.len())
    }
}

/// An output stream of a job.
struct Printer {
    job: Arc<ControlJob>,
    stream: OutputStream,
}

impl Write for Printer {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.job.print(self.stream, bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Runs the verb `words` with `places` in place of its own. Returns the exit code.
fn perform(
    words: Vec<OsString>,
    places: Vec<OsString>,
    live: ServedVolume,
    job: &Arc<ControlJob>,
) -> u32 {
    let printer = |stream| Printer { job: job.clone(), stream };
    let console = Arc::new(Console::to(Box::new(printer(OutputStream::Err))));
    let mut out = BufWriter::new(printer(OutputStream::Out));
    let caches = live.caches.clone();
    let result = parse(words, places, live).and_then(|(arguments, needs_mappings)| {
        if needs_mappings {
            // Only the kernel has this data so far.
            caches.store_mappings()?;
        }
        verbs::run_to(&arguments.verb, &mut out, &console)
    });
    exit::report(result, &console) as u32
}

/// Parses the command line, and replaces its places by the mounted volume. Also returns whether the
/// verb needs data that programs stored through memory mappings.
fn parse(
    words: Vec<OsString>,
    places: Vec<OsString>,
    live: ServedVolume,
) -> std::result::Result<(Arguments, bool), VerbFailure> {
    let wrong = |what: &str| VerbFailure::Usage(format!("{what} while a volume is mounted"));
    let words = iter::once("offshoot".into()).chain(words);
    let parsed = Arguments::try_parse_from(words);
    let mut arguments = parsed.map_err(|_| wrong("this command line cannot be done"))?;
    let found = arguments.verb.on_mount().filter(|found| found.places.len() == places.len());
    let found = found.ok_or_else(|| wrong("this verb cannot be done"))?;
    if let Some(option) = found.opening {
        return Err(wrong(&format!("{option} has no meaning")));
    }
    for (named, place) in found.places.into_iter().zip(places) {
        *named = place;
    }
    *found.live = Some(Arc::new(live));
    let needs_mappings = found.needs_mappings;
    Ok((arguments, needs_mappings))
}
