//! A process that mounts and unmounts for the one that serves the filesystem.
//!
//! The serving process reads untrusted volumes, so it gives its rights away first. Mounting and
//! unmounting take rights: the system calls need those of an administrator, and `fusermount3` works
//! only where programs may still gain rights. So a second process keeps these rights. It reads
//! nothing but the messages below. Even if the serving process is taken over, it can do nothing but
//! mount and unmount this one mount, and hold its block device.
//!
//! ```text
//! serves                helper
//!   b'm'  ───────────>    mounts
//!   b'b'  ───────────>    mounts over the block device
//!   b'h'  ───────────>    holds the block device
//!         <───────────    nothing and a descriptor, or what failed
//!   b'l', b'f', b'u' ─>   unmounts lazily, by force, when unused
//!         <───────────    nothing, or what failed
//!   ends                  ends
//! ```
//!
//! The messages go over a `SOCK_SEQPACKET` socket, which is the standard input of the helper. Each
//! answer starts with a byte, because an empty message means the end of the socket. A failure is
//! sent as two texts with a zero byte between them: what the helper tried, and the reason.

use std::io::{self, IoSlice};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::process::{Command, Stdio};

use offshoot_vfs::{Error, OsReason, Result};
use parking_lot::Mutex;
use rustix::io::{Errno, retry_on_intr, write};
use rustix::net::{
    AddressFamily, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketFlags, SocketType,
    sendmsg, socketpair,
};
use tracing::info;

use crate::mount::{BlockMounter, Mounter, Unmount, receive};
use crate::watch;

const MOUNT: u8 = b'm';
const MOUNT_BLOCK: u8 = b'b';
const HOLD: u8 = b'h';

/// The messages that unmount.
const UNMOUNT: [(u8, Unmount); 3] =
    [(b'l', Unmount::Lazily), (b'f', Unmount::ByForce), (b'u', Unmount::Unused)];

/// The first byte of an answer that reports a failure.
const FAILED: u8 = b'-';

/// The longest message, in bytes. A longer one is cut off.
const MAX_BYTES: usize = 4096;

/// The helper process, seen from the serving process. It ends when this value is dropped or the
/// serving process ends.
#[derive(Debug)]
pub struct Helper {
    /// Locked from a question to its answer.
    socket: Mutex<OwnedFd>,
}

impl Helper {
    /// Starts `command`, which has to call [`help`] with its standard input.
    ///
    /// # Errors
    /// Those of starting a process.
    pub fn start(mut command: Command) -> io::Result<Self> {
        let flags = SocketFlags::CLOEXEC;
        let (ours, theirs) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
        // The helper keeps no output of this process open: a program that reads such an output to
        // its end must not wait for the helper.
        command.stdin(theirs).stdout(Stdio::null()).stderr(Stdio::null()).spawn()?;
        Ok(Self { socket: Mutex::new(ours) })
    }

    /// Asks for what is answered with a descriptor.
    fn ask_for(&self, word: u8) -> Result<OwnedFd> {
        let without = || Error::io("an answer of the process that mounts", Errno::BADMSG);
        self.ask(word)?.ok_or_else(without)
    }

    fn ask(&self, word: u8) -> Result<Option<OwnedFd>> {
        let lost = |error| Error::io("asking the process that mounts and unmounts", error);
        let socket = self.socket.lock();
        retry_on_intr(|| write(&*socket, &[word])).map_err(|errno| lost(errno.into()))?;
        let mut answer = [0; MAX_BYTES];
        let (len, device) = receive(&*socket, &mut answer).map_err(lost)?;
        match answer[..len].split_first() {
            None => Err(lost(io::ErrorKind::UnexpectedEof.into())),
            Some((&FAILED, text)) => {
                let text = String::from_utf8_lossy(text);
                let (what, reason) = text.split_once('\0').unwrap_or((&text, "it failed"));
                Err(Error::io(what, io::Error::other(reason)))
            }
            Some(_) => Ok(device),
        }
    }
}

impl Mounter for Helper {
    fn mount(&self) -> Result<OwnedFd> {
        self.ask_for(MOUNT)
    }

    fn unmount(&self, how: Unmount) -> Result<()> {
        let word = UNMOUNT.iter().find(|(_, known)| *known == how).map(|(word, _)| *word);
        self.ask(word.expect("every way has one")).map(drop)
    }
}

impl BlockMounter for Helper {
    fn mount_block(&self) -> Result<OwnedFd> {
        let device = self.ask_for(MOUNT_BLOCK)?;
        info!(target: watch::MOUNT, "mounted over the block device");
        Ok(device)
    }

    fn hold(&self) -> Result<OwnedFd> {
        self.ask_for(HOLD)
    }
}

/// Carries out with `mounter` what messages over `socket` ask for, until the socket ends.
///
/// # Errors
/// Those of the socket.
pub fn help(socket: BorrowedFd<'_>, mounter: &dyn BlockMounter) -> io::Result<()> {
    loop {
        let mut word = [0];
        if receive(socket, &mut word)?.0 == 0 {
            return Ok(());
        }
        let done = match word[0] {
            MOUNT => mounter.mount().map(Some),
            MOUNT_BLOCK => mounter.mount_block().map(Some),
            HOLD => mounter.hold().map(Some),
            other => match UNMOUNT.iter().find(|(known, _)| *known == other) {
                Some((_, how)) => mounter.unmount(*how).map(|()| None),
                None => Err(Error::posix(Errno::BADMSG, "mounting for another process")),
            },
        };
        match send(socket, done) {
            // The serving process has ended.
            Err(Errno::PIPE | Errno::CONNRESET) => return Ok(()),
            result => result?,
        }
    }
}

fn send(socket: BorrowedFd<'_>, done: Result<Option<OwnedFd>>) -> Result<(), Errno> {
    let (text, device) = match done {
        Ok(device) => (vec![b'+'], device),
        Err(error) => (failure(&error), None),
    };
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let descriptors = device.as_ref().map(|device| [device.as_fd()]);
    if let Some(descriptors) = &descriptors {
        assert!(control.push(SendAncillaryMessage::ScmRights(descriptors)), "there is room");
    }
    let parts = [IoSlice::new(&text)];
    retry_on_intr(|| sendmsg(socket, &parts, &mut control, SendFlags::NOSIGNAL)).map(drop)
}

/// The message that reports a failure.
fn failure(error: &Error) -> Vec<u8> {
    let text = match error {
        Error::Io { what, source, .. } => format!("{what}\0{}", OsReason(source)),
        other => format!("mounting with another process\0{other}"),
    };
    let mut message = vec![FAILED];
    message.extend_from_slice(&text.as_bytes()[..text.len().min(MAX_BYTES - 1)]);
    message
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;

    /// Returns a descriptor that is no mount, and fails to unmount except by force.
    struct Refuses;

    impl Mounter for Refuses {
        fn mount(&self) -> Result<OwnedFd> {
            Ok(std::fs::File::open("/dev/null").expect("it is there").into())
        }

        fn unmount(&self, how: Unmount) -> Result<()> {
            match how {
                Unmount::ByForce => Ok(()),
                _ => Err(Error::io("x".repeat(2 * MAX_BYTES), Errno::BUSY)),
            }
        }
    }

    impl BlockMounter for Refuses {
        fn mount_block(&self) -> Result<OwnedFd> {
            Err(Error::io("mounting", Errno::NODEV))
        }

        fn hold(&self) -> Result<OwnedFd> {
            self.mount()
        }
    }

    #[test]
    fn what_is_asked_is_done_and_its_failure_told() {
        let (ours, theirs) =
            socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)
                .expect("two sockets");
        let helping = thread::spawn(move || help(theirs.as_fd(), &Refuses));
        let helper = Helper { socket: Mutex::new(ours) };
        let device = helper.mount().expect("a descriptor");
        let bytes = rustix::io::read(&device, &mut [0; 1]);
        assert_eq!(bytes, Ok(0), "it is /dev/null");
        let error = helper.mount_block().expect_err("it is refused");
        assert!(error.to_string().contains("No such device"), "{error}");
        helper.hold().expect("a descriptor");
        assert!(helper.unmount(Unmount::ByForce).is_ok());
        let error = helper.unmount(Unmount::Lazily).expect_err("it is refused");
        assert!(error.to_string().starts_with("xxx"), "{error}");
        // The helper refuses an unknown message, and answers the next one.
        assert!(helper.ask(b'?').is_err());
        assert!(helper.unmount(Unmount::ByForce).is_ok());
        drop(helper);
        helping.join().expect("no panic").expect("a good end");
    }

    #[test]
    fn a_helper_that_is_gone_is_an_error() {
        let helper = Helper::start(Command::new("true")).expect("it starts");
        assert!(helper.unmount(Unmount::Lazily).is_err());
    }
}
