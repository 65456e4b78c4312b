//! Requests and answers over `/dev/fuse`: a read takes one request, a write sends one answer.
//!
//! The kernel keeps a lock and lists of requests for each opening of the device. Threads that share
//! an opening wait for each other there. So every thread gets an opening of its own, joined to the
//! mount with an ioctl that no safe function offers. That ioctl is the unsafe part: the kernel
//! reads one number through the pointer that it gets. All openings are made at the mount, one for
//! each thread that may wait for a request, because the process may later lose the right to open
//! files. More threads than that share the openings. If the device cannot be opened a second time,
//! all threads share one opening.
//!
//! One more opening does not block. A thread looks there for the next request for a moment before
//! it sleeps in a read of its own opening. The kernel takes an answer only over the opening that
//! its request came from.

#![expect(unsafe_code, reason = "one ioctl, as the essay says")]

use std::io::{self, IoSlice};
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use rustix::buffer::spare_capacity;
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::ioctl::{self, Opcode, Setter, ioctl};
use zerocopy::IntoBytes;

use crate::dispatch::{Answer, Dispatcher, LARGE_BYTES, MAX_BYTES};
use crate::output::AnswerBody;
use crate::request::Request;
use crate::wire::{InHeader, OutHeader, ReadIn, WriteIn, opcode};

/// Room for the header and the fixed part beside the data, with some to spare.
const HEAD_BYTES: usize = 4096;

/// `FUSE_DEV_IOC_CLONE`.
const CLONE: Opcode = ioctl::opcode::read::<u32>(229, 0);

/// How long a thread looks for the next request before it sleeps. To wake a sleeping CPU takes
/// longer than most calls, as [`crate::ring`] says.
const LOOK: Duration = Duration::from_micros(60);

/// Opens the device, for a new mount.
pub(crate) fn open() -> Result<OwnedFd, Errno> {
    open_with(OFlags::empty())
}

fn open_with(flags: OFlags) -> Result<OwnedFd, Errno> {
    rustix::fs::open("/dev/fuse", OFlags::RDWR | OFlags::CLOEXEC | flags, Mode::empty())
}

/// Another opening that is joined to the mount of `device`.
fn join(device: &OwnedFd, flags: OFlags) -> Result<OwnedFd, Errno> {
    let new = open_with(flags)?;
    let number = u32::try_from(device.as_raw_fd()).expect("descriptors are not negative");
    // SAFETY: the ioctl reads one `u32` through the pointer that `Setter` passes, and does not
    // keep the pointer.
    unsafe { ioctl(&new, Setter::<CLONE, u32>::new(number)) }?;
    Ok(new)
}

/// Another opening for threads that sleep in a read, or `device` itself if it cannot be had.
pub(crate) fn another(device: &Arc<OwnedFd>) -> Arc<OwnedFd> {
    join(device, OFlags::empty()).map_or_else(|_| device.clone(), Arc::new)
}

/// An opening for threads that look for a request, if it can be had.
pub(crate) fn without_blocking(device: &OwnedFd) -> Option<Arc<OwnedFd>> {
    join(device, OFlags::NONBLOCK).ok().map(Arc::new)
}

/// The outcome of a wait for a request, or of a look.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum DeviceEvent {
    Request,
    /// No request came while the thread looked.
    Nothing,
    /// The mount has ended.
    Gone,
}

/// A thread's channel to the kernel over `/dev/fuse`.
pub(crate) struct DeviceChannel {
    device: Arc<OwnedFd>,
    /// Where the last request came from.
    came_from: Arc<OwnedFd>,
    /// The last request. Its capacity is that of the largest request, and is not written before
    /// such a request comes.
    request: Vec<u8>,
    /// The header of the last request, unless that is malformed.
    header: Option<InHeader>,
    answer: Box<[u8]>,
}

impl DeviceChannel {
    /// A channel over the opening `device`.
    pub(crate) fn new(device: Arc<OwnedFd>) -> Self {
        let bytes = HEAD_BYTES + usize::try_from(MAX_BYTES).expect("1 MiB");
        let (request, answer) = (Vec::with_capacity(bytes), vec![0; bytes].into_boxed_slice());
        Self { came_from: device.clone(), device, request, header: None, answer }
    }

    /// Sleeps until a request comes, and receives it.
    pub(crate) fn receive(&mut self) -> io::Result<DeviceEvent> {
        loop {
            match self.read(self.device.clone())? {
                DeviceEvent::Nothing => {}
                event => return Ok(event),
            }
        }
    }

    /// Looks for a request over `opening`, which does not block, and receives it if it comes soon.
    /// Yields the CPU to every other thread meanwhile.
    pub(crate) fn look(&mut self, opening: &Arc<OwnedFd>) -> io::Result<DeviceEvent> {
        let begun = Instant::now();
        loop {
            let event = self.read(opening.clone())?;
            if event != DeviceEvent::Nothing || begun.elapsed() >= LOOK {
                return Ok(event);
            }
            thread::yield_now();
        }
    }

    /// The thread that made the received request; 0 stands for the kernel.
    pub(crate) fn asking(&self) -> u32 {
        self.header.map_or(0, |header| header.pid)
    }

    fn read(&mut self, from: Arc<OwnedFd>) -> io::Result<DeviceEvent> {
        self.request.clear();
        match rustix::io::read(&from, spare_capacity(&mut self.request)) {
            Ok(_) => {
                self.came_from = from;
                self.header = Request::decode(&self.request).ok().map(|request| request.header);
                Ok(DeviceEvent::Request)
            }
            // `ECONNABORTED` when the mount ended while a request was being read.
            Err(Errno::NODEV | Errno::CONNABORTED) => Ok(DeviceEvent::Gone),
            // The asking program has given up, or a signal came, or there is no request.
            Err(Errno::NOENT | Errno::INTR | Errno::AGAIN) => Ok(DeviceEvent::Nothing),
            Err(error) => Err(error.into()),
        }
    }

    /// Whether the answer to the received request is likely to wait for the disk or to move much
    /// data.
    pub(crate) fn may_take_long(&self) -> bool {
        self.header.is_some_and(|header| {
            let mut arguments = Request::behind(header, &self.request).arguments;
            match header.opcode {
                opcode::FSYNC
                | opcode::FSYNCDIR
                | opcode::SYNCFS
                | opcode::FALLOCATE
                | opcode::COPY_FILE_RANGE
                | opcode::IOCTL => true,
                opcode::READ => arguments.take().is_ok_and(|read: ReadIn| read.size >= LARGE_BYTES),
                opcode::WRITE => {
                    arguments.take().is_ok_and(|write: WriteIn| write.size >= LARGE_BYTES)
                }
                _ => false,
            }
        })
    }

    /// Lets `dispatcher` answer the received request, and sends the answer.
    pub(crate) fn answer(&mut self, dispatcher: &Dispatcher) -> io::Result<Answer> {
        let bytes = &self.request[..];
        let mut out = AnswerBody::new(&mut self.answer);
        let (unique, answer) = match self.header {
            Some(header) => {
                (header.unique, dispatcher.answer(&Request::behind(header, bytes), &mut out))
            }
            None => (refused(bytes)?, Answer::Failed(Errno::INVAL)),
        };
        let (error, body) = match answer {
            Answer::Sent => (0, out.bytes()),
            Answer::Failed(errno) => (-errno.raw_os_error(), &[][..]),
            Answer::Silence => return Ok(answer),
        };
        let len = u32::try_from(size_of::<OutHeader>() + body.len()).expect("little over 1 MiB");
        let header = OutHeader { len, error, unique };
        let parts = [IoSlice::new(header.as_bytes()), IoSlice::new(body)];
        match rustix::io::writev(&self.came_from, &parts) {
            // The asking program has given up, or the mount has ended, which the next read reports.
            Ok(_) | Err(Errno::NOENT | Errno::NODEV) => Ok(answer),
            Err(error) => Err(error.into()),
        }
    }
}

/// The `unique` number of a malformed request. An answer with it fails the request, so that no
/// program waits forever.
fn refused(bytes: &[u8]) -> io::Result<u64> {
    // The number follows the length and the opcode, 4 bytes each.
    let unique = bytes.get(8..).and_then(|rest| rest.first_chunk());
    unique.map(|&unique| u64::from_ne_bytes(unique)).ok_or_else(|| {
        let what = format!("{} bytes from /dev/fuse are no request", bytes.len());
        io::Error::new(io::ErrorKind::InvalidData, what)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A header with a wrong length is refused, and still gets an answer.
    #[test]
    fn what_is_no_request_is_refused_by_its_number() {
        let header = [[99_u32, 1].as_bytes(), [7_u64].as_bytes()].concat();
        assert!(Request::decode(&header).is_err());
        assert_eq!(refused(&header).ok(), Some(7));
        assert!(refused(&header[..15]).is_err());
    }
}
