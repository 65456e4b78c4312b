//! The threads that serve a mount.
//!
//! A thread takes a request, answers it, and takes the next one. While one call waits for the disk,
//! for a commit or for space, other threads serve other calls. All threads of io_uring exist from
//! the start. At `/dev/fuse`, more threads come when none is left to take the next request, and
//! [`idle_threads`] stay when they come back ([`crate::idle`]).
//!
//! ```text
//! source          threads          what comes
//! /dev/fuse       1 .. 64          everything; beside io_uring: INIT, FORGET, INTERRUPT
//! queue of a CPU  64/n, 8 or more  everything else, n being the number of CPUs
//! ```
//!
//! Once the kernel has agreed to use io_uring, it sends nothing until all queues are served. So
//! this process starts the threads and gets all else that io_uring takes before it offers io_uring.
//! If it cannot get them, it does not offer. If the kernel refuses a single entry, the kernel and
//! this process continue with the other entries or with `/dev/fuse`.
//!
//! After any other failure of a thread of io_uring, or of the last thread of `/dev/fuse`, a program
//! might wait for an answer forever. So the mount ends.
//!
//! A call that panics leaves the filesystem in an unknown state, so the process aborts. The kernel
//! then fails all requests, and the volume opens again as after a crash.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, OnceLock};
use std::thread;

use offshoot_vfs::{Code, Errno, Error, FileSystemMut, Result};
use rustix::process::{Resource, getrlimit};
use tracing::{debug, info};

use crate::caches::KernelCaches;
use crate::cpus;
use crate::device::{self, DeviceChannel, DeviceEvent};
use crate::dispatch::{Answer, Dispatcher};
use crate::idle::{IdleThreads, SHORT_TICKS};
use crate::look::SharedLook;
use crate::mount::{Mounter, Unmount, has_ended};
use crate::options::{ServeOptions, Transport};
use crate::ring::{ReceivedRequest, RingChannel};
use crate::watch::MOUNT;

/// The most threads of `/dev/fuse`, and of io_uring where that leaves [`LEAST_ENTRIES`] to each
/// queue.
const MOST_THREADS: usize = 64;

/// The least number of threads of a queue of io_uring. With 8, eight calls from one CPU can wait,
/// and the ninth queues behind them.
const LEAST_ENTRIES: usize = 8;

/// The most threads of io_uring. Machines that may have more than 128 CPUs are served over
/// `/dev/fuse`.
const MOST_ENTRIES: usize = 1024;

/// The switch by which the administrator enables FUSE over io_uring.
const SWITCH: &str = "/sys/module/fuse/parameters/enable_uring";

/// Checks whether the kernel offers io_uring, before threads and memory are spent on it.
fn offered() -> io::Result<()> {
    match std::fs::read_to_string(SWITCH) {
        Ok(text) if text.trim() == "Y" => Ok(()),
        Ok(_) => Err(io::Error::other(format!("{SWITCH} does not say Y"))),
        Err(error) => Err(io::Error::new(error.kind(), format!("{SWITCH}: {error}"))),
    }
}

/// How many threads may wait for requests at `/dev/fuse`.
fn waiting_threads() -> usize {
    cpus::usable().max(2)
}

/// How many threads may be idle: those that wait at `/dev/fuse` and those that are parked. To start
/// a thread and to end it takes longer than most calls.
fn idle_threads() -> usize {
    cpus::usable().max(8)
}

/// Threads of io_uring that wait for the decision of the kernel. They serve after [`Self::begin`],
/// and end if this is dropped without it.
struct WaitingThreads(Arc<OnceLock<bool>>);

impl WaitingThreads {
    fn begin(&self) {
        let _ = self.0.set(true);
    }
}

impl Drop for WaitingThreads {
    fn drop(&mut self) {
        // After `begin` this changes nothing.
        let _ = self.0.set(false);
    }
}

/// What the threads of a mount share.
struct Pool {
    dispatcher: Dispatcher,
    device: Arc<OwnedFd>,
    /// Descriptors of `/dev/fuse`, one for each thread that may wait there. New threads take them
    /// in turns.
    ways: Vec<Arc<OwnedFd>>,
    next_way: AtomicUsize,
    look: Option<SharedLook>,
    mounter: Arc<dyn Mounter>,
    /// The number of threads of `/dev/fuse` that are not parked; `waiting` of them wait for a
    /// request.
    serving: AtomicUsize,
    waiting: AtomicUsize,
    idle: IdleThreads,
    is_given_up: AtomicBool,
    /// Why the mount uses `/dev/fuse`, if it tried io_uring first.
    fallback: OnceLock<io::Error>,
}

/// A filesystem that is mounted and served.
pub struct Server {
    pool: Arc<Pool>,
    /// Receives the error that ended the mount. The channel closes when all threads have ended.
    errors: Receiver<io::Error>,
}

impl Server {
    /// Mounts `fs` with `mounter`, and begins to serve it. When this returns, it has opened all the
    /// files that serving needs.
    ///
    /// # Errors
    /// Those of the host, and when the kernel speaks another version of the protocol.
    pub fn start(
        fs: Box<dyn FileSystemMut>,
        mounter: Arc<dyn Mounter>,
        options: ServeOptions,
    ) -> Result<Self> {
        let transport = options.transport;
        let device = Arc::new(mounter.mount()?);
        let waiting = waiting_threads();
        let dispatcher = Dispatcher::new(fs, options, device.clone());
        let gives_up = mounter.clone();
        dispatcher.when_destroyed(Box::new(move || gives_up.give_up()));
        let pool = Arc::new(Pool {
            ways: (0..waiting).map(|_| device::another(&device)).collect(),
            next_way: AtomicUsize::new(0),
            look: SharedLook::new(&device),
            dispatcher,
            device,
            mounter,
            serving: AtomicUsize::new(0),
            waiting: AtomicUsize::new(0),
            idle: IdleThreads::new(idle_threads().saturating_sub(waiting)),
            is_given_up: AtomicBool::new(false),
            fallback: OnceLock::new(),
        });
        let (sender, errors) = channel();
        if let Err(error) = pool.begin(transport, &sender) {
            // No thread may be there to answer what unmounting asks, so it may not ask. A mount in
            // use stays: it only has to disappear from the name space.
            if pool.mounter.unmount(Unmount::ByForce).is_err() {
                let _ = pool.mounter.unmount(Unmount::Lazily);
            }
            return Err(error);
        }
        let server = Self { pool, errors };
        let fallback = server.fallback().map(tracing::field::display);
        info!(target: MOUNT, transport = ?server.transport(), fallback, "mounted");
        Ok(server)
    }

    /// How requests come: over io_uring, or over `/dev/fuse`.
    #[must_use]
    pub fn transport(&self) -> Transport {
        if self.pool.dispatcher.has_rings() { Transport::IoUring } else { Transport::Device }
    }

    /// Why the mount uses `/dev/fuse` although the options allow io_uring.
    #[must_use]
    pub fn fallback(&self) -> Option<&io::Error> {
        self.pool.fallback.get()
    }

    /// Serves until the filesystem is unmounted, and then makes all changes durable.
    ///
    /// # Errors
    /// Those of the final sync, and of the connection to the kernel.
    pub fn wait(self) -> Result<()> {
        let broken = self.errors.iter().last();
        info!(target: MOUNT, "the mount has ended, storing everything");
        if !self.pool.dispatcher.is_stored() {
            self.pool.mounter.reclaim()?;
        }
        self.pool.dispatcher.end()?;
        info!(target: MOUNT, "everything is stored");
        match broken {
            Some(error) => Err(Error::io("serving the mount", error)),
            None => Ok(()),
        }
    }

    /// The caches of the kernel, for code that changes the filesystem beside the mount.
    #[must_use]
    pub fn caches(&self) -> KernelCaches {
        self.pool.dispatcher.caches()
    }

    /// A handle for other threads while this one serves.
    #[must_use]
    pub fn control(&self) -> MountControl {
        MountControl { pool: self.pool.clone() }
    }
}

/// A mount, for threads that do not serve it.
#[derive(Clone)]
pub struct MountControl {
    pool: Arc<Pool>,
}

impl MountControl {
    /// Makes all changes so far durable.
    ///
    /// # Errors
    /// Those of the filesystem.
    pub fn sync(&self) -> Result<()> {
        self.pool.dispatcher.sync()
    }

    /// Makes all changes so far durable, and ends all writing, as an unmount does. Programs that
    /// still use files get `EIO` or `EROFS`.
    ///
    /// # Errors
    /// Those of the filesystem.
    pub fn end(&self) -> Result<()> {
        self.pool.dispatcher.end()
    }
}

impl Pool {
    /// Answers INIT, the first request of the kernel, and starts the threads.
    fn begin(self: &Arc<Self>, transport: Transport, errors: &Sender<io::Error>) -> Result<()> {
        let failed = |error: io::Error| Error::io("beginning to serve the mount", error);
        let insists = transport == Transport::IoUring;
        let rings = match transport {
            Transport::Device => None,
            Transport::IoUring => Some(self.start_rings(insists, errors).map_err(failed)?),
            Transport::Best => offered()
                .and_then(|()| self.start_rings(insists, errors))
                .map_err(|error| self.fallback.set(error))
                .ok(),
        };
        if rings.is_some() {
            self.dispatcher.offer_rings();
        }
        let mut channel = self.device();
        let asked = channel.receive().map_err(failed)?;
        if asked == DeviceEvent::Gone
            || channel.answer(&self.dispatcher).map_err(failed)? != Answer::Sent
        {
            return Err(failed(Errno::PROTO.into()));
        }
        if insists && !self.dispatcher.has_rings() {
            let what = "FUSE over io_uring, which Linux 6.14 and newer have where";
            return Err(Error::unsupported(Code::Unsupported, format!("{what} {SWITCH} says Y")));
        }
        if self.dispatcher.lacks_idmap() {
            let what = "mapped ids over FUSE, which Linux 6.12 and newer have";
            return Err(Error::unsupported(Code::Unsupported, what));
        }
        self.start(channel, errors).map_err(failed)?;
        let (pool, senders) = (self.clone(), errors.clone());
        spawn(move || pool.guard(&senders)).map_err(failed)?;
        match rings {
            Some(rings) if self.dispatcher.has_rings() => rings.begin(),
            Some(_) => drop(self.fallback.set(io::Error::other("the kernel does not use it"))),
            None => {}
        }
        Ok(())
    }

    /// Starts the threads of io_uring, which wait for [`WaitingThreads::begin`].
    fn start_rings(
        self: &Arc<Self>,
        insists: bool,
        errors: &Sender<io::Error>,
    ) -> io::Result<WaitingThreads> {
        let queues = cpus::queues()?;
        let each = entries(queues, getrlimit(Resource::Nofile).current)?;
        let waiting = WaitingThreads(Arc::default());
        for queue in (0..queues).flat_map(|queue| std::iter::repeat_n(queue, each)) {
            let mut channel = RingChannel::new(self.device.clone(), queue)?;
            let (pool, errors, begins) = (self.clone(), errors.clone(), waiting.0.clone());
            spawn(move || {
                if *begins.wait()
                    && let Err(error) = pool.serve_ring(queue, &mut channel, insists)
                {
                    pool.give_up(error, &errors);
                }
            })?;
        }
        Ok(waiting)
    }

    fn serve_ring(&self, queue: u16, channel: &mut RingChannel, insists: bool) -> io::Result<()> {
        channel.join()?;
        loop {
            match channel.receive()? {
                ReceivedRequest::Request => channel.answer(&self.dispatcher)?,
                ReceivedRequest::Refused(errno) if insists => return Err(errno.into()),
                ReceivedRequest::Refused(errno) => {
                    let what = format!("a thread less serves queue {queue} of FUSE over io_uring");
                    self.dispatcher.report(&Error::io(what, errno));
                    return Ok(());
                }
                ReceivedRequest::Gone => {
                    self.reclaim();
                    return Ok(());
                }
            }
        }
    }

    /// A channel over `/dev/fuse` for one more thread.
    fn device(&self) -> DeviceChannel {
        let way = self.next_way.fetch_add(1, Ordering::Relaxed) % self.ways.len();
        DeviceChannel::new(self.ways[way].clone())
    }

    /// Starts a thread that serves `/dev/fuse` over `channel`.
    fn start(
        self: &Arc<Self>,
        channel: DeviceChannel,
        errors: &Sender<io::Error>,
    ) -> io::Result<()> {
        debug!(target: MOUNT, "starting a thread of /dev/fuse");
        let (pool, errors) = (self.clone(), errors.clone());
        self.serving.fetch_add(1, Ordering::Relaxed);
        let started = spawn(move || {
            let served = pool.serve(channel, &errors);
            let others = pool.serving.fetch_sub(1, Ordering::Relaxed) - 1;
            match served {
                Err(error) if others == 0 && !pool.call() => {
                    pool.idle.end();
                    pool.give_up(error, &errors);
                }
                Err(error) => pool.dispatcher.report(&Error::io("a thread of the mount", error)),
                Ok(()) => {}
            }
        });
        if started.is_err() {
            self.serving.fetch_sub(1, Ordering::Relaxed);
        }
        started
    }

    /// Calls a parked thread. Returns `false` if there is none.
    fn call(&self) -> bool {
        // The thread counts before it wakes, so that no other believes to be the last.
        self.serving.fetch_add(1, Ordering::Relaxed);
        let is_called = self.idle.call();
        if !is_called {
            self.serving.fetch_sub(1, Ordering::Relaxed);
        }
        is_called
    }

    /// Gets one more thread to the device, unless all of them are busy.
    fn add(self: &Arc<Self>, errors: &Sender<io::Error>) {
        if !self.call() && self.serving.load(Ordering::Relaxed) < MOST_THREADS {
            // If no thread starts, the existing threads still serve, and the guard tries again.
            let _ = self.start(self.device(), errors);
        }
    }

    /// Gets one more thread to the device whenever none waits there at several looks in a row.
    fn guard(self: &Arc<Self>, errors: &Sender<io::Error>) {
        let mut short_ticks = 0;
        while self.idle.wait_until_short() {
            if self.waiting.load(Ordering::Relaxed) > 0 {
                short_ticks = 0;
                continue;
            }
            short_ticks += 1;
            if short_ticks >= SHORT_TICKS {
                self.add(errors);
            }
            // Threads that are stuck leave no note. When all threads serve, the next one that comes
            // back leaves one.
            if self.serving.load(Ordering::Relaxed) < MOST_THREADS {
                self.idle.note_short();
            }
        }
    }

    /// Ends the mount, because a program may wait for an answer that no thread will give. Does
    /// nothing if the mount has ended already.
    fn give_up(&self, error: io::Error, errors: &Sender<io::Error>) {
        if self.is_gone() || self.is_given_up.swap(true, Ordering::Relaxed) {
            return;
        }
        // Sending fails only if the `Server` is dropped; then no code waits for the error.
        let _ = errors.send(error);
        if self.mounter.unmount(Unmount::ByForce).is_err() {
            std::process::abort();
        }
    }

    /// Whether the kernel has ended the mount.
    fn is_gone(&self) -> bool {
        has_ended(&*self.device).unwrap_or(false)
    }

    /// Takes back what was lent to the mount, before more is written. Called by each thread that
    /// finds the end.
    fn reclaim(&self) {
        if !self.dispatcher.is_stored()
            && let Err(error) = self.mounter.reclaim()
        {
            // `Server::wait` returns the same error.
            debug!(target: MOUNT, %error, "nothing more is written");
        }
    }

    /// Looks for a request if that is worth it, and else sleeps until one comes.
    fn receive(&self, channel: &mut DeviceChannel) -> io::Result<DeviceEvent> {
        let Some(look) = self.look.as_ref().filter(|_| !self.dispatcher.has_rings()) else {
            return channel.receive();
        };
        let [serving, waiting] =
            [&self.serving, &self.waiting].map(|count| count.load(Ordering::Relaxed));
        let event = match look.look(channel, serving.saturating_sub(waiting))? {
            Some(event) => event,
            None => channel.receive()?,
        };
        if event == DeviceEvent::Request {
            look.note(channel.asking());
        }
        Ok(event)
    }

    fn serve(
        self: &Arc<Self>,
        mut channel: DeviceChannel,
        errors: &Sender<io::Error>,
    ) -> io::Result<()> {
        loop {
            self.waiting.fetch_add(1, Ordering::Relaxed);
            let received = self.receive(&mut channel);
            let is_last = self.waiting.fetch_sub(1, Ordering::Relaxed) == 1;
            if is_last {
                self.idle.note_short();
            }
            if received? == DeviceEvent::Gone {
                self.idle.end();
                self.reclaim();
                return Ok(());
            }
            if is_last && channel.may_take_long() {
                self.add(errors);
            }
            if let Err(error) = channel.answer(&self.dispatcher) {
                self.dispatcher.report(&Error::io("answering the kernel", error));
            }
            if self.waiting.load(Ordering::Relaxed) >= self.ways.len() {
                self.serving.fetch_sub(1, Ordering::Relaxed);
                let is_called = self.idle.park();
                if !is_called {
                    // The caller counts this thread off.
                    self.serving.fetch_add(1, Ordering::Relaxed);
                    return Ok(());
                }
            }
        }
    }
}

/// How many entries each of `queues` queues gets. All entries together take at most half of the
/// descriptors that the process may have. For example, 16 queues get 8 entries each, 128 in all,
/// which takes a limit of at least 256 descriptors.
fn entries(queues: u16, descriptors: Option<u64>) -> io::Result<usize> {
    let queues = usize::from(queues);
    let each = (MOST_THREADS / queues).max(LEAST_ENTRIES);
    let all = each * queues;
    if all > MOST_ENTRIES {
        let what = format!("{queues} CPUs are too many for FUSE over io_uring");
        return Err(io::Error::new(io::ErrorKind::Unsupported, what));
    }
    match descriptors {
        Some(most) if all as u64 > most / 2 => {
            let what = format!(
                "FUSE over io_uring takes {all} descriptors, more than half of the {most} that RLIMIT_NOFILE allows"
            );
            Err(io::Error::new(io::ErrorKind::QuotaExceeded, what))
        }
        _ => Ok(each),
    }
}

/// Starts a thread whose panic ends the process.
fn spawn(run: impl FnOnce() + Send + 'static) -> io::Result<()> {
    let run = move || {
        let _ends = EndWithPanic;
        run();
    };
    thread::Builder::new().name("fuse".to_owned()).spawn(run).map(drop)
}

/// Aborts the process when its thread panics.
struct EndWithPanic;

impl Drop for EndWithPanic {
    fn drop(&mut self) {
        if thread::panicking() {
            std::process::abort();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_that_machines_and_limits_bear() {
        for (queues, descriptors, expected) in [
            (1, Some(1024), 64),
            (2, Some(128), 32),
            (2, None, 32),
            (16, Some(1024), 8),
            (64, Some(1024), 8),
            (128, Some(4096), 8),
        ] {
            assert_eq!(entries(queues, descriptors).ok(), Some(expected), "{queues} queues");
        }
        for (queues, descriptors) in [(2, Some(127)), (128, Some(1024)), (129, None)] {
            assert!(entries(queues, descriptors).is_err(), "{queues}, {descriptors:?}");
        }
    }
}
