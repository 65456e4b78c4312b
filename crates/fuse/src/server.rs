//! The threads that serve a mount.
//!
//! A thread takes a request, answers it, and takes the next one. When it takes one and no other thread is waiting, it starts one more: so
//! a call that waits for the disk, for a commit or for space never keeps others waiting. When enough are waiting, a thread that comes back ends.
//!
//! A call that panics leaves the filesystem in a state that nobody knows, so the process ends then: the kernel answers all that is asked
//! with an error, and the volume opens again as after a crash.

use std::io;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;

use offshoot_vfs::{Errno, Error, FileSystemMut, Result};

use crate::device::{self, DeviceChannel};
use crate::dispatch::{Answer, Dispatcher};
use crate::mount::{MountOptions, Unmount, mount, unmount};
use crate::options::ServeOptions;
use crate::transport::Channel;

/// The most threads that answer requests.
const MOST_THREADS: usize = 64;

/// Threads that wait for requests: more would only take turns.
fn waiting_threads() -> usize {
    thread::available_parallelism().map_or(2, usize::from).max(2)
}

/// What the threads of a mount share.
struct Pool {
    dispatcher: Dispatcher,
    device: std::os::fd::OwnedFd,
    /// Threads that there are, and those of them that wait for a request.
    threads: AtomicUsize,
    waiting: AtomicUsize,
}

/// A filesystem that is mounted and served.
pub struct Server {
    pool: Arc<Pool>,
    /// It ends when all threads have ended.
    errors: Receiver<io::Error>,
}

impl Server {
    /// Mounts `fs` over `dir` and begins to serve it.
    ///
    /// # Errors
    /// Those of the host, and when the kernel speaks another version of the protocol.
    pub fn start(
        fs: Box<dyn FileSystemMut>,
        dir: &Path,
        how: &MountOptions,
        options: ServeOptions,
    ) -> Result<Self> {
        let device = mount(dir, how)?;
        let dispatcher = Dispatcher::new(fs, options);
        let (threads, waiting) = (AtomicUsize::new(0), AtomicUsize::new(0));
        let pool = Arc::new(Pool { dispatcher, device, threads, waiting });
        let (sender, errors) = channel();
        let begun = pool.begin().and_then(|channel| pool.start(channel, &sender));
        if let Err(error) = begun {
            // It serves nobody, so whether it goes from the name space at once is all that is left to do.
            let _ = unmount(dir, Unmount::Lazily);
            return Err(error);
        }
        Ok(Self { pool, errors })
    }

    /// Serves until the filesystem is unmounted, and makes everything durable that was done.
    ///
    /// # Errors
    /// Those of making it durable, and of the connection to the kernel.
    pub fn wait(self) -> Result<()> {
        let broken = self.errors.iter().last();
        self.pool.dispatcher.end()?;
        match broken {
            Some(error) => Err(Error::io("serving the mount", error)),
            None => Ok(()),
        }
    }

    /// What other threads have of it while it serves.
    #[must_use]
    pub fn control(&self) -> Control {
        Control { pool: self.pool.clone() }
    }
}

/// A mount, for those who do not serve it.
#[derive(Clone)]
pub struct Control {
    pool: Arc<Pool>,
}

impl Control {
    /// Makes everything durable that was done so far.
    ///
    /// # Errors
    /// Those of the filesystem.
    pub fn sync(&self) -> Result<()> {
        self.pool.dispatcher.sync()
    }
}

impl Pool {
    fn channel(&self) -> io::Result<Box<dyn Channel>> {
        use std::os::fd::AsFd;
        Ok(Box::new(DeviceChannel::new(device::join(self.device.as_fd())?)))
    }

    /// Answers the first request, with which the kernel begins.
    fn begin(&self) -> Result<Box<dyn Channel>> {
        let failed = |error: io::Error| Error::io("beginning to serve the mount", error);
        let mut channel = self.channel().map_err(failed)?;
        if channel.receive().map_err(failed)?
            && channel.answer(&self.dispatcher).map_err(failed)? == Answer::Sent
        {
            return Ok(channel);
        }
        Err(failed(Errno::PROTO.into()))
    }

    /// Starts a thread that serves over `channel`.
    fn start(
        self: &Arc<Self>,
        channel: Box<dyn Channel>,
        errors: &Sender<io::Error>,
    ) -> Result<()> {
        let (pool, errors) = (self.clone(), errors.clone());
        self.threads.fetch_add(1, Ordering::Relaxed);
        let run = move || {
            let _ends = EndWithPanic;
            if let Err(error) = pool.serve(channel, &errors) {
                // Nobody listens any more when the server is gone.
                let _ = errors.send(error);
            }
            pool.threads.fetch_sub(1, Ordering::Relaxed);
        };
        let started = thread::Builder::new().name("fuse".to_owned()).spawn(run);
        started.map(drop).map_err(|error| {
            self.threads.fetch_sub(1, Ordering::Relaxed);
            Error::io("starting a thread", error)
        })
    }

    fn serve(
        self: &Arc<Self>,
        mut channel: Box<dyn Channel>,
        errors: &Sender<io::Error>,
    ) -> io::Result<()> {
        let enough = waiting_threads();
        loop {
            self.waiting.fetch_add(1, Ordering::Relaxed);
            let received = channel.receive();
            let others = self.waiting.fetch_sub(1, Ordering::Relaxed) - 1;
            if !received? {
                return Ok(());
            }
            if others == 0 && self.threads.load(Ordering::Relaxed) < MOST_THREADS {
                // Without one more, those that there are serve on.
                if let Ok(channel) = self.channel() {
                    let _ = self.start(channel, errors);
                }
            }
            if let Err(error) = channel.answer(&self.dispatcher) {
                self.dispatcher.report(&Error::io("answering the kernel", error));
            }
            if self.waiting.load(Ordering::Relaxed) >= enough {
                return Ok(());
            }
        }
    }
}

/// Ends the process when its thread panics.
struct EndWithPanic;

impl Drop for EndWithPanic {
    fn drop(&mut self) {
        if thread::panicking() {
            std::process::abort();
        }
    }
}
