//! An overlay filesystem with a mount of ours for what changes.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};

use offshoot_testkit::compare::{Aspect, Compare};
use offshoot_testkit::host::HostFilesystem;
use offshoot_testkit::loops::unmount_or_detach;
use offshoot_testkit::run::run;
use offshoot_testkit::scratch_dir;

use super::{ServedMount, require, touch_all, twins};

/// What a container does to its image. The lower directory has `etc`, `usr` and `srv`.
const CHANGES: &str = r#"
    cd "$1"
    umask 022
    echo new > etc/hosts.new && mv etc/hosts.new etc/hosts
    rm etc/motd && ! cat etc/motd 2> /dev/null
    rm -r usr/share/doc && mkdir usr/share/doc && echo again > usr/share/doc/only
    mv usr/bin/tool usr/bin/renamed && ! cat usr/bin/tool 2> /dev/null
    mv usr/bin/renamed etc/motd
    ln etc/hosts etc/hosts.link
    chmod 4755 usr/bin/second
    chown 1000:1000 usr/bin/second
    setfattr -n user.note -v text usr/bin/second
    echo more >> usr/bin/second
    mkdir -p var/lib && mv var/lib var/moved
    mv -T srv var/srv
    mknod var/device c 1 3
    mkfifo var/fifo
    ln -s ../etc/hosts var/link
    for n in $(seq 200); do echo $n > var/moved/$n; done
    for n in $(seq 2 2 200); do rm var/moved/$n; done
    perl -e 'rename("usr/share/doc", "usr/share/pages") or die "a directory: $!"'
    sync -f .
"#;

/// An overlay mount. It ends when it is dropped.
struct OverlayMount(PathBuf);

impl OverlayMount {
    /// Puts an overlay over `dir`, with what changes below `upper`.
    fn new(dir: &Path, lower: &Path, upper: &Path) -> Self {
        for name in ["upper", "work"] {
            std::fs::create_dir_all(upper.join(name)).expect("a directory");
        }
        let [lower, upper] = [lower, upper].map(|path| path.display().to_string());
        let options = format!(
            "lowerdir={lower},upperdir={upper}/upper,workdir={upper}/work,redirect_dir=on,uuid=null"
        );
        let words = ["-t", "overlay", "overlay", "-o", &options].map(OsStr::new);
        run("mount", &[&words[..], &[dir.as_os_str()]].concat());
        Self(dir.to_owned())
    }
}

impl Drop for OverlayMount {
    fn drop(&mut self) {
        if let Err(error) = unmount_or_detach(&self.0) {
            println!("{}: {error}", self.0.display());
        }
    }
}

/// The same changes through an overlay over our mount and over the kernel's leave the same, in the
/// overlay and below it: whiteouts, opaque directories, redirects. What is there after the overlay
/// is mounted again is the same too.
#[test]
fn an_overlay_keeps_its_changes_here() {
    let Some(judges) = require() else { return };
    let (ours, theirs) = twins(&judges, 512);
    let mounted = ServedMount::new(&ours.images()[0], "allow_other");
    let kernel = theirs.mount("rw");
    let lower = scratch_dir();
    let image = "cd \"$1\"; umask 022; mkdir -p etc usr/bin usr/share/doc/sub srv/www; \
        for f in etc/hosts etc/motd usr/bin/tool usr/bin/second usr/share/doc/sub/page \
        srv/www/index; do echo $f > $f; done";
    let shell = |script: &str, dir: &Path| {
        let words = ["-ec", script, "sh"].map(OsStr::new);
        run("sh", &[&words[..], &[dir.as_os_str()]].concat());
    };
    shell(image, lower.path());
    let merged = [scratch_dir(), scratch_dir()];
    let compare = Compare::default().without(Aspect::Ids).without(Aspect::StoredTimes);
    for turn in 0..2 {
        let overlays: Vec<_> = [mounted.path(), kernel.path()]
            .into_iter()
            .zip(&merged)
            .map(|(upper, dir)| OverlayMount::new(dir.path(), lower.path(), upper))
            .collect();
        if turn == 0 {
            for dir in &merged {
                shell(CHANGES, dir.path());
                touch_all(dir.path());
            }
        }
        let shown = HostFilesystem::new(merged[0].path()).expect("it opens");
        compare.run(&shown, merged[1].path()).assert_same(100);
        drop((shown, overlays));
        let uppers = [mounted.path(), kernel.path()].map(|mount| mount.join("upper"));
        // The whiteouts have times too.
        for dir in &uppers {
            touch_all(dir);
        }
        let shown = HostFilesystem::new(&uppers[0]).expect("it opens");
        compare.run(&shown, &uppers[1]).assert_same(100);
    }
    mounted.unmount();
    ours.assert_checks();
}
