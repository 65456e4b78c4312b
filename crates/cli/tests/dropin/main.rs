//! The program as `mkfs.btrfs`, through a link of that name.
//!
//! | module | judge |
//! |---|---|
//! | `same` | the real tool, with the same options |
//! | `filled` | `btrfs check` and the kernel: what `--rootdir` has is in the volume |
//! | `callers` | programs that call `mkfs.btrfs` and find the link first |

mod callers;
mod filled;
mod same;

use std::os::unix::fs::{FileExt, symlink};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use offshoot_testkit::scratch_dir;
use tempfile::TempDir;

/// A directory to work in, with the link in `bin`.
struct Bench {
    dir: TempDir,
}

impl Bench {
    fn new() -> Self {
        let dir = scratch_dir();
        let bench = Self { dir };
        std::fs::create_dir(bench.path("bin")).expect("a directory");
        symlink(env!("CARGO_BIN_EXE_offshoot"), bench.link()).expect("a link");
        bench
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// The link by which the program is `mkfs.btrfs`.
    fn link(&self) -> PathBuf {
        self.path("bin/mkfs.btrfs")
    }

    /// A sparse file of so many MiB.
    fn image(&self, name: &str, mib: u64) -> PathBuf {
        let path = self.path(name);
        let file = std::fs::File::create(&path).expect("a file");
        file.set_len(mib << 20).expect("it becomes longer");
        path
    }

    /// A sparse file of so many MiB that has the signature of ext4, and bytes wherever something is
    /// written when a volume is made.
    fn occupied(&self, name: &str, mib: u64) -> PathBuf {
        let path = self.image(name, mib);
        let file = std::fs::File::options().write(true).open(&path).expect("a file");
        let put = |bytes: &[u8], at| file.write_all_at(bytes, at).expect("it is written");
        let pieces = (0..mib).step_by(16).chain([mib - 1]);
        pieces.for_each(|at| put(&vec![0x5A; 128 << 10], at << 20));
        put(&[0x5A; 4096], (mib << 20) - 4096);
        put(&[0x53, 0xEF], 0x438);
        path
    }

    /// Runs `program` in the directory with the words of `line`.
    fn run(&self, program: &Path, line: &str) -> Output {
        let mut command = Command::new(program);
        command.args(line.split_whitespace()).current_dir(self.dir.path()).stdin(Stdio::null());
        command.output().expect("it starts")
    }

    /// Runs the link, which must succeed without messages, and returns its output.
    #[track_caller]
    fn does(&self, line: &str) -> String {
        let output = self.run(&self.link(), line);
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success() && said.is_empty(), "mkfs.btrfs {line}: {said}");
        String::from_utf8_lossy(&output.stdout).into_owned()
    }

    /// Runs the link, which must fail, and returns its message.
    #[track_caller]
    fn fails(&self, line: &str) -> String {
        let output = self.run(&self.link(), line);
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(1), "mkfs.btrfs {line}: {said}");
        assert!(said.starts_with("offshoot: "), "mkfs.btrfs {line}: {said}");
        said
    }
}
