//! The memory of an entry, which the kernel and a thread write in turns, and the io_uring that
//! hands it over.
//!
//! ```text
//!            register, commit
//!   ours  ─────────────────────>  lent      the kernel reads the answer and writes the next request
//!         <─────────────────────
//!              wait: a completion
//! ```
//!
//! When an entry is registered, the kernel learns where its memory is. It uses these addresses as
//! long as the entry exists. While the memory is lent, it belongs to the kernel. No type of the
//! language expresses that, so this module is unsafe. It relies on three rules:
//!
//! 1. From registration on the memory stays in place. Raw pointers from boxes hold it, and no code
//!    replaces them.
//! 2. The kernel gives one completion for each submission. From the completion to the next
//!    submission it writes nothing. An entry has one submission at a time, and no code reads memory
//!    that is lent.
//! 3. The memory is freed only when the kernel does not know it: before registration, after a
//!    refused registration, or when the mount is gone. An entry that is dropped at another time,
//!    after a panic or an error, leaks its memory to the kernel.
//!
//! What the kernel writes are only bytes here: `request` checks them as it decodes them.

#![expect(unsafe_code, reason = "pointers are given to io_uring, as the essay says")]

use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use io_uring::register::Restriction;
use io_uring::squeue::Entry128;
use io_uring::{IoUring, cqueue, opcode, types};
use rustix::io::Errno;
use zerocopy::{FromZeros, IntoBytes};

use crate::dispatch::MAX_BYTES;
use crate::wire::{RingCommand, RingHeader, ring_command};

/// How often a wait asks again when the kernel has no memory or no time, and the pause before each
/// new attempt: 10 s in all.
const TRIES: u32 = 1000;
const PAUSE: Duration = Duration::from_millis(10);

/// How long a thread polls for the next request before it sleeps, if the last request came that
/// soon.
///
/// Waking a sleeping processor takes longer than most calls, above all on a virtual machine. The
/// program that waits for an answer wakes on a sleeping processor, if there is one. A thread that
/// polls keeps its own processor awake, and yields it to every other thread. Without polling, one
/// program that makes small files on two processors woke a processor with every call: a fourth of
/// its time.
const LOOK: Duration = Duration::from_micros(50);

/// A piece of memory, as system calls take it (`struct iovec`).
#[repr(C)]
struct IoVec {
    start: *mut u8,
    len: usize,
}

/// The memory of a request, and then of its answer.
struct RequestMemory {
    header: *mut RingHeader,
    payload: *mut [u8],
    /// The addresses of both, for the kernel.
    pieces: *mut [IoVec; 2],
}

impl RequestMemory {
    /// Zeroed memory, which costs nothing until it is written.
    fn new() -> Self {
        let payload = vec![0; usize::try_from(MAX_BYTES).expect("1 MiB")].into_boxed_slice();
        let header = Box::into_raw(Box::new(RingHeader::new_zeroed()));
        let payload = Box::into_raw(payload);
        let pieces = [
            IoVec { start: header.cast(), len: size_of::<RingHeader>() },
            IoVec { start: payload.cast(), len: payload.len() },
        ];
        Self { header, payload, pieces: Box::into_raw(Box::new(pieces)) }
    }
}

/// An io_uring with one entry of a queue.
pub(super) struct RingEntry {
    ring: IoUring<Entry128, cqueue::Entry>,
    device: Arc<OwnedFd>,
    queue: u16,
    memory: RequestMemory,
    /// The memory belongs to the kernel.
    is_lent: bool,
    /// The kernel knows where the memory is.
    is_known: bool,
    /// The last command to the kernel, and the id of the request whose answer the kernel takes with
    /// it.
    asked: (u32, u64),
    /// The last request came within [`LOOK`].
    is_busy: bool,
}

// SAFETY: the pointers lead to memory that the entry owns. Only the entry and the kernel use them.
unsafe impl Send for RingEntry {}

impl RingEntry {
    /// An unregistered entry for this queue of the mount of `device`.
    pub(super) fn new(device: Arc<OwnedFd>, queue: u16) -> io::Result<Self> {
        // One thread alone uses the ring, and the kernel does its part of the work while that
        // thread waits.
        let ring = IoUring::builder()
            .dontfork()
            .setup_r_disabled()
            .setup_single_issuer()
            .setup_defer_taskrun()
            .setup_taskrun_flag()
            .build(1)?;
        // A ring could make requests that a filter of system calls refuses. So this ring is
        // restricted to one command before it is enabled.
        let command = opcode::UringCmd80::CODE;
        ring.submitter().register_restrictions(&mut [Restriction::sqe_op(command)])?;
        let (memory, asked) = (RequestMemory::new(), (ring_command::REGISTER, 0));
        let (is_lent, is_known, is_busy) = (false, false, false);
        Ok(Self { ring, device, queue, memory, is_lent, is_known, asked, is_busy })
    }

    /// Registers the entry, which has no request yet. From now on only this thread may use it.
    pub(super) fn register(&mut self) -> io::Result<()> {
        self.ring.submitter().register_enable_rings()?;
        self.lend()
    }

    /// Hands the answer in the buffers to the kernel, and asks for the next request.
    pub(super) fn commit(&mut self, id: u64) -> io::Result<()> {
        self.asked = (ring_command::COMMIT_AND_FETCH, id);
        self.lend()
    }

    /// Whether the kernel refused to register this entry.
    pub(super) fn is_refused(&self) -> bool {
        self.asked.0 == ring_command::REGISTER && !self.is_lent && !self.is_known
    }

    /// The header and the payload of the received request. They hold a request if the last wait
    /// succeeded.
    pub(super) fn buffers(&mut self) -> (&mut RingHeader, &mut [u8]) {
        assert!(!self.is_lent, "the thread that looks at a request has waited for it");
        // SAFETY: both came from boxes that only drop frees. The kernel writes to them only while
        // they are lent. These two references borrow the entry mutably, so meanwhile no code gets
        // the buffers again or lends them.
        unsafe { (&mut *self.memory.header, &mut *self.memory.payload) }
    }

    /// Queues the command in `asked`, and lends the memory. The next wait submits it.
    fn lend(&mut self) -> io::Result<()> {
        assert!(!self.is_lent, "there is one submission at a time");
        let (what, commit_id) = self.asked;
        let command = RingCommand { commit_id, qid: self.queue, ..RingCommand::default() };
        let mut bytes = [0; 80];
        bytes[..size_of::<RingCommand>()].copy_from_slice(command.as_bytes());
        let pieces = self.memory.pieces.expose_provenance() as u64;
        self.memory.header.expose_provenance();
        self.memory.payload.cast::<u8>().expose_provenance();
        let mut entry = opcode::UringCmd80::new(types::Fd(self.device.as_raw_fd()), what)
            .cmd(bytes)
            .addr(Some(pieces))
            .build();
        set_len(&mut entry, 2);
        (self.is_lent, self.is_known) = (true, true);
        // SAFETY: the pieces, and the memory that they point to, stay in place as long as the
        // kernel knows them.
        unsafe { self.ring.submission().push(&entry) }.map_err(io::Error::other)
    }

    /// Waits for a request. Asks again while the kernel is busy.
    ///
    /// # Errors
    /// The error of the kernel, `EBUSY` after [`TRIES`] attempts.
    pub(super) fn wait(&mut self) -> io::Result<()> {
        for _ in 0..TRIES {
            match self.wait_once() {
                Err(Errno::AGAIN | Errno::BUSY | Errno::INTR) => thread::sleep(PAUSE),
                result => return Ok(result?),
            }
            if !self.is_lent {
                self.lend()?;
            }
        }
        Err(Errno::BUSY.into())
    }

    fn wait_once(&mut self) -> Result<(), Errno> {
        let begun = Instant::now();
        loop {
            if let Some(completion) = self.ring.completion().next() {
                assert!(self.is_lent, "a completion comes of a submission");
                self.is_lent = false;
                self.is_busy = begun.elapsed() < LOOK;
                let error = completion.result().checked_neg().unwrap_or(i32::MAX);
                if error <= 0 {
                    return Ok(());
                }
                let error = Errno::from_raw_os_error(error);
                if self.asked.0 == ring_command::REGISTER || is_gone(error) {
                    self.is_known = false;
                }
                return Err(error);
            }
            if self.is_busy {
                self.enter(0)?;
                while !self.has_come() && begun.elapsed() < LOOK {
                    thread::yield_now();
                }
            }
            if self.ring.completion().is_empty() {
                self.enter(1)?;
            }
        }
    }

    /// Whether a completion has come, or the kernel has work for this thread that leads to one.
    fn has_come(&mut self) -> bool {
        !self.ring.completion().is_empty() || self.ring.submission().taskrun()
    }

    /// Submits what is queued, and waits for this many completions or for a signal.
    fn enter(&mut self, completions: usize) -> Result<(), Errno> {
        match self.ring.submit_and_wait(completions) {
            Err(error) if error.raw_os_error() != Some(Errno::INTR.raw_os_error()) => {
                Err(Errno::from_io_error(&error).unwrap_or(Errno::IO))
            }
            _ => Ok(()),
        }
    }
}

impl Drop for RingEntry {
    fn drop(&mut self) {
        if !self.is_known {
            let RequestMemory { header, payload, pieces } = self.memory;
            // SAFETY: the three came from boxes, only this drop frees them, and the kernel does not
            // know them.
            unsafe { drop((Box::from_raw(header), Box::from_raw(payload), Box::from_raw(pieces))) };
        }
    }
}

/// Whether the kernel says that the mount is gone, and its entries with it.
pub(super) fn is_gone(error: Errno) -> bool {
    matches!(error, Errno::NOTCONN | Errno::CONNABORTED | Errno::NODEV)
}

/// Sets the number of pieces, which the builder of such an entry cannot set.
fn set_len(entry: &mut Entry128, len: u32) {
    /// The offset of the length in an entry (`struct io_uring_sqe`), in bytes.
    const LEN: usize = 24;
    const { assert!(size_of::<Entry128>() == 128) };
    // SAFETY: an entry is 128 bytes of plain numbers, in the layout of the kernel.
    unsafe { std::ptr::from_mut(entry).cast::<[u8; 4]>().add(LEN / 4).write(len.to_ne_bytes()) };
}
