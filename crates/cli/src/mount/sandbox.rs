//! The sandbox of the process that serves a mount.
//!
//! The process reads volumes that may come from an attacker. If such a volume ever takes control of
//! the process, it must be able to do only what the process does anyway: read and write the devices
//! of that volume, and answer the kernel. So the process gives up all other rights, in two steps,
//! and the kernel never gives them back.
//!
//! ```text
//! opened: log, devices ──> helper started ──> enter ──> volume read, mounted, threads and rings started ──> close ──> served
//! ```
//!
//! | | from | what it takes away |
//! |---|---|---|
//! | no new privileges | `enter` | programs with set-id bits or capabilities give no rights |
//! | capabilities | `enter` | all of them: open files need none |
//! | Landlock | `enter` | all files except `/dev/fuse`, and reading `/proc` and `/sys`, which is needed to count threads and rings; TCP; signals to others |
//! | seccomp | `close` | every system call that is not in [`ALLOWED`]: opening, running and signalling anything, sockets, mounting, rings |
//!
//! Capabilities, and Landlock before Linux 7.0, belong to a thread and are inherited. So `enter`
//! runs before there is a second thread. The filter of system calls applies to all threads at once.
//!
//! *A refused call fails with `EPERM`.* Ending the process would be as safe. But if the table
//! misses a call of a C library that we do not know yet, that would end a mount that is in use.
//! With `EPERM` the call is an error in the log, or the library does without it.
//!
//! *io_uring* bypasses such a filter, because the operations of a ring are not system calls. No
//! ring is made after `close`, and the existing rings are restricted to passing FUSE requests and
//! replies (`offshoot-fuse`, `ring/shared`).
//!
//! *Work that needs more rights* is done by others: a [`helper`](super::helper) mounts and
//! unmounts. Panics are printed without the names of functions, because looking them up opens
//! files.
//!
//! If the kernel lacks one of these, the others are in force, and the log says so.

use std::collections::BTreeMap;
use std::fmt;

use landlock::{
    ABI, Access, AccessFs, AccessNet, Ruleset, RulesetAttr, RulesetCreatedAttr, RulesetError,
    RulesetStatus, Scope, path_beneath_rules,
};
use nix::libc;
use rustix::thread::{CapabilitySet, CapabilitySets, set_capabilities, set_no_new_privs};
use seccompiler::{
    SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter, SeccompRule,
    TargetArch, apply_filter_all_threads,
};

/// Which restrictions are in force, and which the kernel lacks.
#[derive(Default)]
pub(super) struct MountSandbox {
    in_force: Vec<&'static str>,
    missing: Vec<String>,
}

impl MountSandbox {
    /// Gives up what is not needed once the devices are open. The process must have one thread
    /// only.
    pub(super) fn enter(&mut self) {
        let none = CapabilitySet::empty();
        let none = CapabilitySets { effective: none, permitted: none, inheritable: none };
        self.note("no capabilities", set_capabilities(None, none));
        self.note("no new privileges", set_no_new_privs(true));
        self.note("Landlock", restrict_files());
    }

    /// Gives up what is not needed once everything is open, in all threads.
    pub(super) fn close(mut self) -> Self {
        self.note("seccomp", filter_calls());
        self
    }

    fn note<E: fmt::Display>(&mut self, what: &'static str, result: Result<(), E>) {
        match result {
            Ok(()) => self.in_force.push(what),
            Err(error) => self.missing.push(format!("{what} ({error})")),
        }
    }
}

impl fmt::Display for MountSandbox {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "sandbox: {}", self.in_force.join(", "))?;
        if !self.missing.is_empty() {
            write!(f, "; not to be had: {}", self.missing.join(", "))?;
        }
        Ok(())
    }
}

/// Refuses files, connections and signals with Landlock.
fn restrict_files() -> Result<(), String> {
    // The seccomp filter refuses what newer versions of Landlock know besides.
    const KNOWN: ABI = ABI::V6;
    let restrict = || -> Result<_, RulesetError> {
        Ruleset::default()
            .handle_access(AccessFs::from_all(KNOWN))?
            .handle_access(AccessNet::from_all(KNOWN))?
            .scope(Scope::from_all(KNOWN))?
            .create()?
            .add_rules(path_beneath_rules(
                ["/proc", "/sys"],
                AccessFs::ReadFile | AccessFs::ReadDir,
            ))?
            .add_rules(path_beneath_rules(
                ["/dev/fuse"],
                AccessFs::ReadFile | AccessFs::WriteFile | AccessFs::IoctlDev,
            ))?
            .restrict_self()
    };
    let status = restrict().map_err(|error| error.to_string())?;
    match status.ruleset {
        RulesetStatus::NotEnforced => Err(format!("{:?}", status.landlock)),
        _ => Ok(()),
    }
}

/// The required value of an argument: its index, the mask of the bits that count, and their value.
type SyscallArgumentBits = (u8, u64, u64);

/// The ioctl that discards a range of a block device.
const BLKDISCARD: u64 = 0x1277;

/// The system calls of a mount while it is served, each with a condition on one argument if needed.
const ALLOWED: &[(libc::c_long, Option<SyscallArgumentBits>)] = &[
    // Devices, the kernel and the log.
    (libc::SYS_read, None),
    (libc::SYS_write, None),
    (libc::SYS_readv, None),
    (libc::SYS_writev, None),
    (libc::SYS_pread64, None),
    (libc::SYS_pwrite64, None),
    (libc::SYS_preadv, None),
    (libc::SYS_pwritev, None),
    (libc::SYS_fsync, None),
    (libc::SYS_fdatasync, None),
    (libc::SYS_fallocate, None),
    (libc::SYS_fadvise64, None),
    (libc::SYS_ioctl, Some((1, u32::MAX as u64, BLKDISCARD))),
    (libc::SYS_flock, None),
    // Closing an image unlocks it.
    (libc::SYS_fcntl, Some((1, u32::MAX as u64, libc::F_OFD_SETLK as u64))),
    (libc::SYS_close, None),
    (libc::SYS_dup3, None),
    #[cfg(target_arch = "x86_64")]
    (libc::SYS_dup2, None),
    (libc::SYS_fcntl, Some((1, u32::MAX as u64, libc::F_GETFD as u64))),
    (libc::SYS_ppoll, None),
    #[cfg(target_arch = "x86_64")]
    (libc::SYS_poll, None),
    (libc::SYS_io_uring_enter, None),
    // The threads of the rings enable them.
    (libc::SYS_io_uring_register, Some((1, u32::MAX as u64, 12))),
    // `sendto` only without an address: to the peer of the socket, and to no other.
    (libc::SYS_sendto, Some((4, u64::MAX, 0))),
    (libc::SYS_recvmsg, None),
    // Memory, but not executable memory.
    (libc::SYS_mmap, Some((2, libc::PROT_EXEC as u64, 0))),
    (libc::SYS_mprotect, Some((2, libc::PROT_EXEC as u64, 0))),
    (libc::SYS_mremap, None),
    (libc::SYS_munmap, None),
    (libc::SYS_madvise, None),
    (libc::SYS_brk, None),
    // New threads, but no new processes.
    (libc::SYS_clone, Some((0, libc::CLONE_THREAD as u64, libc::CLONE_THREAD as u64))),
    // The other filter refuses `clone3` with an error that the C library understands.
    (libc::SYS_clone3, None),
    (libc::SYS_set_robust_list, None),
    (libc::SYS_rseq, None),
    (libc::SYS_prctl, Some((0, u32::MAX as u64, libc::PR_SET_NAME as u64))),
    (libc::SYS_prctl, Some((0, u32::MAX as u64, libc::PR_SET_VMA as u64))),
    (libc::SYS_sched_getaffinity, None),
    (libc::SYS_sched_setaffinity, None),
    (libc::SYS_sched_yield, None),
    (libc::SYS_futex, None),
    (libc::SYS_exit, None),
    (libc::SYS_exit_group, None),
    // Signal handling, and how a panic ends the process.
    (libc::SYS_rt_sigaction, None),
    (libc::SYS_rt_sigprocmask, None),
    (libc::SYS_rt_sigreturn, None),
    (libc::SYS_rt_sigtimedwait, None),
    (libc::SYS_sigaltstack, None),
    (libc::SYS_restart_syscall, None),
    // Process numbers, random numbers and times.
    (libc::SYS_getpid, None),
    (libc::SYS_gettid, None),
    (libc::SYS_getcpu, None),
    (libc::SYS_getrandom, None),
    (libc::SYS_clock_gettime, None),
    (libc::SYS_clock_nanosleep, None),
    (libc::SYS_nanosleep, None),
];

/// Refuses system calls with seccomp.
fn filter_calls() -> Result<(), seccompiler::Error> {
    let target = TargetArch::try_from(std::env::consts::ARCH)?;
    // A filter cannot read the arguments of `clone3`, because they are in memory. So this filter
    // makes `clone3` look missing, and the C library falls back to `clone`.
    let clone3 = BTreeMap::from([(libc::SYS_clone3, Vec::new())]);
    apply(clone3, SeccompAction::Allow, refuse(libc::ENOSYS), target)?;
    let mut rules = BTreeMap::new();
    // A panic may signal this process, and no other one.
    let own: SyscallArgumentBits = (0, u64::from(u32::MAX), u64::from(std::process::id()));
    for (call, bits) in ALLOWED.iter().chain(&[(libc::SYS_tgkill, Some(own))]) {
        let conditions: &mut Vec<_> = rules.entry(*call).or_default();
        if let Some((index, mask, value)) = *bits {
            let (length, op) = (SeccompCmpArgLen::Qword, SeccompCmpOp::MaskedEq(mask));
            let condition = SeccompCondition::new(index, length, op, value)?;
            conditions.push(SeccompRule::new(vec![condition])?);
        }
    }
    apply(rules, refuse(libc::EPERM), SeccompAction::Allow, target)
}

fn refuse(errno: libc::c_int) -> SeccompAction {
    SeccompAction::Errno(errno.cast_unsigned())
}

fn apply(
    rules: BTreeMap<libc::c_long, Vec<SeccompRule>>,
    otherwise: SeccompAction,
    matching: SeccompAction,
    target: TargetArch,
) -> Result<(), seccompiler::Error> {
    let filter = SeccompFilter::new(rules, otherwise, matching, target)?;
    apply_filter_all_threads(&seccompiler::BpfProgram::try_from(filter)?)
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::io::ErrorKind::PermissionDenied;
    use std::net::{TcpListener, UdpSocket};
    use std::os::unix::net::UnixDatagram;
    use std::process::Command;
    use std::thread;

    use super::*;

    /// The sandbox refuses what it should and allows what a mount needs. A process of its own
    /// enters it and runs the test below.
    #[test]
    fn the_process_is_kept_from_what_it_does_not_need() {
        let program = std::env::current_exe().expect("it runs");
        let name = "mount::sandbox::tests::in_the_sandbox";
        let output = Command::new(program).args(["--exact", name, "--ignored"]).output();
        let output = output.expect("it runs again");
        let said = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success() && said.contains("1 passed"), "{said}");
    }

    #[test]
    #[ignore = "it takes from the process what other tests need"]
    fn in_the_sandbox() {
        let socket = UnixDatagram::pair().expect("two sockets");
        let mut file = tempfile::tempfile().expect("a file");
        let parent = rustix::process::getppid().expect("the test that started it");
        let mut sandbox = MountSandbox::default();
        sandbox.enter();
        assert!(File::open("/proc/self/status").is_ok(), "numbers can be read");
        assert!(File::open("/dev/fuse").is_ok(), "and the kernel asked");
        for path in ["/etc/passwd", "/dev/null", "."] {
            assert_eq!(File::open(path).err().map(|e| e.kind()), Some(PermissionDenied), "{path}");
        }
        let said = sandbox.close().to_string();
        assert_eq!(said, "sandbox: no capabilities, no new privileges, Landlock, seccomp");
        // A new thread starts as before, and has the same restrictions.
        thread::spawn(move || {
            std::io::Write::write_all(&mut file, b"data").expect("what is open can be written");
            file.sync_all().expect("and made durable");
            socket.0.send(b"x").expect("and sent over");
            let refused = [
                ("open", File::open("/proc/self/status").map(drop)),
                ("open", File::open("/dev/fuse").map(drop)),
                ("create", File::create("/tmp/offshoot").map(drop)),
                ("remove", std::fs::remove_file("/tmp/offshoot")),
                ("look at", std::fs::metadata("/").map(drop)),
                ("run", Command::new("/bin/true").status().map(drop)),
                ("listen", TcpListener::bind("127.0.0.1:0").map(drop)),
                ("bind", UdpSocket::bind("127.0.0.1:0").map(drop)),
                ("send to", socket.0.send_to(b"x", "/dev/log").map(drop)),
                ("pair", UnixDatagram::pair().map(drop)),
                ("truncate", file.set_len(1)),
                ("signal", rustix::process::test_kill_process(parent).map_err(Into::into)),
            ];
            for (what, result) in refused {
                let kind = result.err().map(|error| error.kind());
                assert_eq!(kind, Some(PermissionDenied), "{what}");
            }
        })
        .join()
        .expect("no panic");
    }
}
