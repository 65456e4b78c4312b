//! Requests and answers over `/dev/fuse`: a read takes one request, a write sends one answer.
//!
//! The kernel keeps a lock and lists of requests for each opening of the device. Threads that share
//! an opening wait for each other there. So every thread gets an opening of its own, joined to the
//! mount with an ioctl that no safe function offers. That ioctl is the unsafe part: the kernel
//! reads one number through the pointer that it gets. All openings are made at the mount, one for
//! each thread that may wait for a request, because the process may later lose the right to open
//! files. More threads than that share the openings. If the device cannot be opened a second time,
//! all threads share one opening.

#![expect(unsafe_code, reason = "one ioctl, as the essay says")]

use std::io::{self, IoSlice};
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;

use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::ioctl::{Opcode, Setter, ioctl, opcode};
use zerocopy::IntoBytes;

use crate::dispatch::{Answer, Dispatcher, MAX_BYTES};
use crate::output::AnswerBody;
use crate::request::Request;
use crate::wire::OutHeader;

/// Room for the header and the fixed part beside the data, with some to spare.
const HEAD_BYTES: usize = 4096;

/// `FUSE_DEV_IOC_CLONE`.
const CLONE: Opcode = opcode::read::<u32>(229, 0);

/// Opens the device, for a new mount.
pub(crate) fn open() -> Result<OwnedFd, Errno> {
    rustix::fs::open("/dev/fuse", OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())
}

/// Another opening that is joined to the mount of `device`, or `device` itself if that fails.
pub(crate) fn join(device: &Arc<OwnedFd>) -> Arc<OwnedFd> {
    let joined = open().and_then(|new| {
        let number = u32::try_from(device.as_raw_fd()).expect("descriptors are not negative");
        // SAFETY: the ioctl reads one `u32` through the pointer that `Setter` passes, and does not
        // keep the pointer.
        unsafe { ioctl(&new, Setter::<CLONE, u32>::new(number)) }.map(|()| new)
    });
    joined.map_or_else(|_| device.clone(), Arc::new)
}

/// A thread's channel to the kernel over `/dev/fuse`.
pub(crate) struct DeviceChannel {
    device: Arc<OwnedFd>,
    /// The last request, in the first `len` bytes.
    request: Box<[u8]>,
    len: usize,
    answer: Box<[u8]>,
}

impl DeviceChannel {
    /// A channel over the opening `device`.
    pub(crate) fn new(device: Arc<OwnedFd>) -> Self {
        let bytes = HEAD_BYTES + usize::try_from(MAX_BYTES).expect("1 MiB");
        let buffer = || vec![0; bytes].into_boxed_slice();
        Self { device, request: buffer(), len: 0, answer: buffer() }
    }

    /// Waits for the next request and receives it. Returns `false` when the mount has ended.
    pub(crate) fn receive(&mut self) -> io::Result<bool> {
        loop {
            match rustix::io::read(&self.device, &mut *self.request) {
                Ok(len) => {
                    self.len = len;
                    return Ok(true);
                }
                // `ECONNABORTED` when the mount ended while a request was being read.
                Err(Errno::NODEV | Errno::CONNABORTED) => return Ok(false),
                // The asking program has given up, or a signal came.
                Err(Errno::NOENT | Errno::INTR | Errno::AGAIN) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// Lets `dispatcher` answer the received request, and sends the answer.
    pub(crate) fn answer(&mut self, dispatcher: &Dispatcher) -> io::Result<Answer> {
        let bytes = &self.request[..self.len];
        let mut out = AnswerBody::new(&mut self.answer);
        let (unique, answer) = match Request::decode(bytes) {
            Ok(request) => (request.header.unique, dispatcher.answer(&request, &mut out)),
            Err(_) => (refused(bytes)?, Answer::Failed(Errno::INVAL)),
        };
        let (error, body) = match answer {
            Answer::Sent => (0, out.bytes()),
            Answer::Failed(errno) => (-errno.raw_os_error(), &[][..]),
            Answer::Silence => return Ok(answer),
        };
        let len = u32::try_from(size_of::<OutHeader>() + body.len()).expect("little over 1 MiB");
        let header = OutHeader { len, error, unique };
        let parts = [IoSlice::new(header.as_bytes()), IoSlice::new(body)];
        match rustix::io::writev(&self.device, &parts) {
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
