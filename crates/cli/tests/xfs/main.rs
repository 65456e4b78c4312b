//! XFS volumes through the program. The kernel fills them, and its mount judges what is shown.
//!
//! | module | what it judges |
//! |---|---|
//! | `look` | the verbs that read |
//! | `changed` | the verbs that write |
//! | `checked` | `check` |
//! | `disks` | volumes in partitions and images |
//! | `made` | new volumes |
//! | `rescued` | `rescue` |
//! | `refused` | verbs and options that XFS volumes have not, and volumes that do not open |
//!
//! Mounts have their tests in `mount`, and damaged volumes in `hostile`.

mod changed;
mod checked;
mod disks;
#[path = "../shared/lines.rs"]
mod lines;
mod look;
mod made;
mod refused;
mod rescued;

use std::fs::File;
use std::os::unix::fs::symlink;
use std::path::Path;

use offshoot_testkit::fill::{directory, write};
use offshoot_testkit::xfs::disk::XfsShutdown;
use offshoot_testkit::xfs::judges::XfsJudges;
use offshoot_testkit::xfs::matrix::XfsVolumeKind;
use offshoot_testkit::xfs::recipe::{FilledXfs, XfsRecipe};
use rustix::fs::{XattrFlags, lsetxattr};

/// A volume with a few files. Its image is `v.img`, in a folder of its own.
struct FewFiles {
    filled: FilledXfs,
}

impl FewFiles {
    fn new(judges: &XfsJudges) -> Self {
        let recipe = XfsRecipe::new(XfsVolumeKind::named("usual")).fill(few);
        let few = Self { filled: recipe.make(judges) };
        few.filled.disk.change_with_xfs_db(&["label root"]);
        let image = few.filled.disk.image();
        symlink(image, few.dir().join("v.img")).expect("a link to the image");
        few
    }

    /// The folder in which the program runs.
    fn dir(&self) -> &Path {
        self.filled.disk.image().parent().expect("images are in a folder")
    }

    /// Leaves a log that holds the file `after`, with the text `logged`.
    fn leave_a_log(&self) {
        let disk = &self.filled.disk;
        let mut mount = disk.mount("rw", &[]);
        let after = mount.path().join("after");
        std::fs::write(&after, "logged").expect("a file");
        File::open(after).and_then(|file| file.sync_all()).expect("an fsync");
        disk.shut_down(&mut mount, XfsShutdown::LogWritten);
    }

    #[track_caller]
    fn does(&self, line: &str) -> String {
        lines::does(self.dir(), line)
    }

    #[track_caller]
    fn fails(&self, line: &str, code: i32) -> String {
        lines::fails(self.dir(), line, code)
    }
}

fn few(root: &Path) {
    write(&root.join("text"), b"what the kernel wrote\n");
    let origin = lsetxattr(root.join("text"), "user.origin", b"here", XattrFlags::empty());
    origin.expect("an attribute");
    let dir = directory(root, "dir");
    write(&dir.join("big"), &vec![b'x'; 300_000]);
    std::fs::hard_link(dir.join("big"), dir.join("again")).expect("a second name");
    symlink("dir/big", root.join("link")).expect("a link");
    let _empty = directory(&dir, "empty");
}
